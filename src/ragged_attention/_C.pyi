from typing import Any

class CudaError(RuntimeError): ...

def ragged_flash_attention(
    q: Any,
    k: Any,
    v: Any,
    input_row_offsets: Any,
    out: Any,
    lse: Any,
    mask_str: str,
    local_window_size: int,
    scale: float | None,
    q_max_seq_len: int | None,
    stream: int | None,
    check_values: bool,
) -> None: ...
def check_ragged_flash_attention(
    q: Any,
    k: Any,
    v: Any,
    input_row_offsets: Any,
    out: Any,
    lse: Any,
    mask_str: str,
    local_window_size: int,
    scale: float | None,
    q_max_seq_len: int | None,
    stream: int | None,
    check_values: bool,
) -> None: ...
def qsa_sparse_attention(
    q: Any,
    input_row_offsets: Any,
    kv_blocks: Any,
    cache_lengths: Any,
    kv_lookup_table: Any,
    layer_idx: int,
    token_indices: Any,
    counts: Any,
    out: Any,
    lse: Any,
    page_stride: int,
    scale: float | None,
    max_prompt_length: int | None,
    max_cache_length: int | None,
    group: int | None,
    warps: int | None,
    unroll: int | None,
    stream: int | None,
    check_values: bool,
) -> None: ...
def check_qsa_sparse_attention(
    q: Any,
    input_row_offsets: Any,
    kv_blocks: Any,
    cache_lengths: Any,
    kv_lookup_table: Any,
    layer_idx: int,
    token_indices: Any,
    counts: Any,
    out: Any,
    lse: Any,
    page_stride: int,
    scale: float | None,
    max_prompt_length: int | None,
    max_cache_length: int | None,
    group: int | None,
    warps: int | None,
    unroll: int | None,
    stream: int | None,
    check_values: bool,
) -> None: ...
def qsa_sparse_paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    logical_indices: Any,
    block_table: Any,
    token_to_req: Any,
    query_start_loc: Any,
    seq_lens: Any,
    out: Any,
    scale: float | None,
    stream: int | None,
) -> None: ...
def supports(op: str, cuda: bool, device: int, dtype: str, head_dim: int, group: int) -> tuple[bool, str, str]: ...
def current_stream(tensor: Any, device: int) -> int | None: ...
def may_be_pending(tensors: dict[str, Any]) -> bool: ...
def xla_handlers() -> list[tuple[str, str, Any]]: ...
def build_info() -> dict[str, str]: ...
def cuda_devices() -> dict[str, Any]: ...
def num_threads() -> int: ...
def set_num_threads(n: int) -> None: ...
