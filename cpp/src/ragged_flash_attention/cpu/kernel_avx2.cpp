#define RAGGED_ATTENTION_KERNEL ragged_tile_avx2
#include "ragged_flash_attention/cpu/kernel.inl"
