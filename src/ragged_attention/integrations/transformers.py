"""An attention implementation for Transformers: one call per layer over packed sequences.

Importing this module registers :data:`IMPLEMENTATION` with Transformers, as an attention function and as a mask
function; :func:`set_attention` makes a model, or a part of one such as its vision tower, use it. It covers what the
operation computes: self-attention over whole sequences, causal or not, with causal sliding windows and grouped heads.
Vision towers, embedding models, rerankers and prompt processing are that; decoding against a KV cache is not. What a
model asks for beyond it is a ``NotImplementedError`` that names the argument.

Sequences are told apart by, in this order:

1. ``cu_seq_lens_q`` and ``cu_seq_lens_k``, which a vision tower makes of its windows and images, and a caller of a text
   model may pass. Nothing is waited for.
2. What the mask function found, once for a forward pass and kind of mask: ``position_ids`` that begin anew, or padding
   on either side in ``attention_mask``. Finding it waits for the device.
3. Otherwise, each row of the batch is a sequence.

Calls are those of ``torch.ops.ragged_attention``, so that models can be compiled; see docs/transformers.md for whole
graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from . import torch as _operators  # noqa: F401  registers them

__all__ = ["IMPLEMENTATION", "set_attention"]

#: The name in Transformers' registries. "flash" in it is what makes vision towers pass the offsets of all windows in
#: one call, instead of calling once for each window.
IMPLEMENTATION = "ragged_flash_attention"


def set_attention(model: transformers.PreTrainedModel) -> None:
    """Make a model use :data:`IMPLEMENTATION`, with every model in it, or a part: ``set_attention(model.visual)``.

    ``attn_implementation=`` and ``set_attn_implementation()`` cannot do it: for a name with "flash" in it, Transformers
    5.24 looks for a package of that name.

    Args:
        model: a model of Transformers whose attention layers look their function up by name.

    Raises:
        TypeError: no model of Transformers.
        NotImplementedError: a model that has its attention built in, or an encoder with a decoder.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model: expected a transformers.PreTrainedModel, got {type(model).__name__}")
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    for part in parts:
        if not part._can_set_attn_implementation():
            raise NotImplementedError(
                f"model: {type(part).__name__} does not look its attention up by name, so it cannot be given another"
            )
        if getattr(part.config, "is_encoder_decoder", False):
            raise NotImplementedError(
                f"model: {type(part).__name__} is an encoder with a decoder, and there is no cross-attention"
            )
    for part in parts:
        part.config._attn_implementation = IMPLEMENTATION


#: What layers pass beside q, k and v that changes the scores: all that the layers of Transformers 5.24 have.
_CHANGES_SCORES = {
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on the scores",
    "indices": "a selection of keys",
    "block_indices": "a selection of keys",
}


def _refuse(argument: str, what: str) -> NotImplementedError:
    return NotImplementedError(f"{argument}: not supported by {IMPLEMENTATION}: {what}")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: Any = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers calls in each layer: q, k and v ``[batch, heads, length, head_dim]``.

    Returns ``[batch, length, heads, head_dim]``, and no weights.
    """
    batch, _, length, _ = query.shape
    if dropout:
        raise _refuse("dropout", "there is no dropout; call model.eval()")
    for name, what in _CHANGES_SCORES.items():
        if others.get(name) is not None:
            raise _refuse(name, what)
    if output_attentions:
        raise _refuse("output_attentions", "weights are never there as a whole")
    if key.shape[2] != length:
        raise _refuse(
            "cache",
            f"queries of other positions than the keys, {length} and {key.shape[2]}: there is no KV cache; pass "
            f"use_cache=False, and decode with another implementation",
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if sliding_window is not None and not causal:
        raise _refuse("sliding_window", "a window that is bounded on both sides")
    mask, window = ("null" if not causal else "causal"), -1
    if sliding_window is not None:
        mask, window = "sliding_window_causal", sliding_window

    # [batch * length, heads, head_dim]: a view for one row of a batch, else a copy where the heads lie outside.
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    offsets = _offsets(attention_mask, cu_seq_lens_q, cu_seq_lens_k, batch, length, query.device)
    longest = max_length_q if isinstance(max_length_q, int) else None
    attend = torch.ops.ragged_attention.ragged_flash_attention
    out = attend(q, k, v, offsets, longest, mask, window, scaling)
    return out.unflatten(0, (batch, length)), None


def _offsets(
    found: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
    batch: int,
    length: int,
    device: torch.device,
) -> torch.Tensor:
    if cu_seq_lens_q is not None:
        if batch != 1:
            raise _refuse("cu_seq_lens_q", f"packed sequences in a batch of {batch}: pack them into one row")
        if cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q:
            return cu_seq_lens_q
        # A collator's two copies are moved to the device one by one. This waits for it; the same tensor does not.
        if cu_seq_lens_k.shape != cu_seq_lens_q.shape or not torch.equal(cu_seq_lens_q, cu_seq_lens_k):
            raise _refuse("cu_seq_lens_k", "keys of other lengths than the queries'")
        return cu_seq_lens_q
    if found is not None:
        if found.dim() != 1:
            raise _refuse("attention_mask", f"a mask made by the caller, of {found.dim()} dimensions")
        return found
    return torch.arange(0, batch * length + 1, max(length, 1), dtype=torch.int32, device=device)


def _sequences(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = None,
    **_others: Any,
) -> torch.Tensor | None:
    """What Transformers calls for a mask: the offsets of the sequences, or None where each row is one.

    ``mask_function(batch, head, query, key)`` says what may be seen, without the padding. A row begins a sequence where
    it does not see the row before it; of a packed batch, and of chunks, that is all there is to know.
    """
    if q_length != kv_length:
        return None  # refused by the attention function, which knows the layer
    if use_vmap:
        raise _refuse("attention_mask", "a mask function of the model's own")
    plain = allow_is_causal_skip or allow_is_bidirectional_skip
    if attention_mask is None and plain:
        return None
    begins = torch.zeros(batch_size, q_length, dtype=torch.bool, device=device)
    begins[:, :1] = True
    batch = torch.arange(batch_size, device=device)[:, None]
    row = torch.arange(1, q_length, device=device)[None]
    if not plain and mask_function is not None:
        head = torch.zeros((), dtype=torch.long, device=device)
        if _answers(mask_function(batch, head, row - 1, row), begins[:, 1:]).any():
            raise _refuse("attention_mask", "rows that see later ones, in a mask that is causal otherwise")
        begins[:, 1:] |= ~_answers(mask_function(batch, head, row, row - 1), begins[:, 1:])
    if attention_mask is not None:
        kept = attention_mask.bool()
        changes = kept[:, 1:] != kept[:, :-1]
        if ((changes & kept[:, 1:]).sum(1) + kept[:, 0] > 1).any():
            raise _refuse("attention_mask", "padding inside of a sequence")
        begins[:, 1:] |= changes  # padding becomes a sequence of its own, which nobody looks at
    ends = torch.tensor([batch_size * q_length], device=device)
    return torch.cat([begins.flatten().nonzero().flatten(), ends]).to(torch.int32)


def _answers(answer: Any, like: torch.Tensor) -> torch.Tensor:
    """A mask function's answer, which may be a plain bool, for every place."""
    return torch.as_tensor(answer, dtype=torch.bool, device=like.device).expand(like.shape)


transformers.AttentionInterface.register(IMPLEMENTATION, _attention)
transformers.AttentionMaskInterface.register(IMPLEMENTATION, _sequences)
