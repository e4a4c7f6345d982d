#define RAGGED_ATTENTION_KERNEL ragged_tile_avx512
#include "ragged_flash_attention/cpu/kernel.inl"
