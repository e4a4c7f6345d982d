#define RAGGED_ATTENTION_KERNEL qsa_row_baseline
#include "qsa_sparse_attention/cpu/kernel.inl"
