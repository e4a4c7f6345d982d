#define RAGGED_ATTENTION_KERNEL qsa_row_avx512
#include "qsa_sparse_attention/cpu/kernel.inl"
