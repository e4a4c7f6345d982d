#define RAGGED_ATTENTION_KERNEL ragged_tile_baseline
#include "ragged_flash_attention/cpu/kernel.inl"
