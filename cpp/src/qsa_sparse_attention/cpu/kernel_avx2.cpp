#define RAGGED_ATTENTION_KERNEL qsa_row_avx2
#include "qsa_sparse_attention/cpu/kernel.inl"
