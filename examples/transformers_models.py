"""Models of Transformers with random weights: eager attention and one call per layer, results and times side by side.

    python examples/transformers_models.py [--device cpu|cuda] [--large]

A vision tower whose windows are packed (Qwen2.5-VL), a text model over packed sequences (Qwen3), and the same with
sliding windows in some of its layers. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable, Iterator

import torch
from transformers import Qwen2_5_VLConfig, Qwen3Config, Qwen3Model
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from ragged_attention.integrations.transformers import set_attention

Forward = Callable[[torch.nn.Module], torch.Tensor]


def vision_tower(device: str, large: bool) -> tuple[torch.nn.Module, Forward]:
    """Images of different sizes in one call. Most layers attend within windows, some within whole images."""
    sizes = {"depth": 8, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420} if large else {
        "depth": 4, "hidden_size": 160, "num_heads": 2, "intermediate_size": 320
    }  # fmt: skip
    config = Qwen2_5_VLConfig(vision_config={**sizes, "fullatt_block_indexes": [1, 3], "out_hidden_size": 64})
    config.vision_config._attn_implementation = "eager"
    grid = torch.tensor([[1, 46, 62], [1, 30, 18], [1, 100, 76]] if large else [[1, 32, 44], [1, 18, 20]])
    patches = int(grid.prod(1).sum())
    torch.manual_seed(1)
    pixels = torch.randn(patches, 3 * 2 * 14 * 14)
    tower = Qwen2_5_VisionTransformerPretrainedModel(config.vision_config)

    def forward(model: torch.nn.Module) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        return model(pixels.to(device, dtype), grid_thw=grid.to(device)).last_hidden_state

    return tower, forward


def text_model(device: str, large: bool, **config_changes: object) -> tuple[torch.nn.Module, Forward]:
    """Sequences packed into one row, told apart by positions that begin anew."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128} if large else {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32
    }  # fmt: skip
    config = Qwen3Config(
        vocab_size=128,
        intermediate_size=2 * int(sizes["hidden_size"]),
        num_hidden_layers=4,
        attn_implementation="eager",
        **sizes,
        **config_changes,
    )
    lengths = [900, 17, 2000, 1, 1178] if large else [300, 1, 500, 8]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    torch.manual_seed(1)
    tokens = torch.randint(0, 128, positions.shape)

    def forward(model: torch.nn.Module) -> torch.Tensor:
        # Offsets in cu_seq_lens_q and cu_seq_lens_k would do as well, and spare the search for where positions begin.
        inputs = {"input_ids": tokens.to(device), "position_ids": positions.to(device)}
        return model(**inputs, use_cache=False).last_hidden_state

    return Qwen3Model(config), forward


def sliding_window_model(device: str, large: bool) -> tuple[torch.nn.Module, Forward]:
    """Layer 0 attends to everything before, the others to a window."""
    return text_model(device, large, use_sliding_window=True, sliding_window=512 if large else 64, max_window_layers=1)


MODELS = {
    "Qwen2.5-VL vision tower": vision_tower,
    "Qwen3, packed": text_model,
    "Qwen3, sliding windows": sliding_window_model,
}


def milliseconds(function: Callable[[], object], device: str) -> float:
    samples = []
    for _ in range(3):
        begin = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - begin))
    return min(samples[1:])


def compare(device: str, dtype: torch.dtype, large: bool) -> Iterator[tuple[str, float, float, float]]:
    """Name of the model; relative error against eager attention in float32; milliseconds eager and with ours."""
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, forward = build(device, large)
        exact_model = model.to(device).eval()
        with torch.inference_mode():
            exact = forward(exact_model)
            compared = copy.deepcopy(exact_model).to(dtype)
            eager_ms = milliseconds(functools.partial(forward, compared), device)
            set_attention(compared)
            out = forward(compared)
            ours_ms = milliseconds(functools.partial(forward, compared), device)
        error = float((out.float() - exact).norm() / exact.norm())
        yield name, error, eager_ms, ours_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--large", action="store_true", help="widths of real models")
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    print(f"{arguments.device}, {dtype}{', large' if arguments.large else ''}")
    print(f"{'':<24} {'relative error':>14} {'eager ms':>10} {'ours ms':>10}")
    for name, error, eager_ms, ours_ms in compare(arguments.device, dtype, arguments.large):
        print(f"{name:<24} {error:>14.1e} {eager_ms:>10.2f} {ours_ms:>10.2f}")
        assert error < (1e-4 if dtype is torch.float32 else 5e-2), f"{name}: the results differ"


if __name__ == "__main__":
    main()
