"""The attention implementation for Transformers: real models with random weights, against eager attention."""

from __future__ import annotations

import copy
import functools
import importlib

import numpy as np
import pytest
from _frameworks import optional


@pytest.fixture(scope="module", autouse=True)
def integration():
    for package in ("torch", "transformers"):
        if optional(package) is None:
            pytest.skip(f"{package} is not installed")
    return importlib.import_module("ragged_attention.integrations.transformers")


def strong(torch, model):
    """Weights with which attention matters: as models start out, its scores are nearly all the same."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            gain = 3.0 if any(part in name for part in ("qkv", "q_proj", "k_proj")) else 1.0
            parameter.data.normal_(0, gain * parameter.shape[-1] ** -0.5, generator=generator)
    return model.eval()


def text_config(**changes):
    from transformers import Qwen3Config

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"vocab_size": 100, "intermediate_size": 96, "num_hidden_layers": 3}
    return Qwen3Config(**{**sizes, **changes}, attn_implementation="eager")


WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def qwen3(torch_device, **changes):
    from transformers import Qwen3Model

    return strong(torch_device.xp, Qwen3Model(text_config(**changes))).to(torch_device.device)


def mistral(torch_device):
    from transformers import MistralConfig, MistralModel

    sizes = text_config().to_dict()
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "intermediate_size")
    config = MistralConfig(**{name: sizes[name] for name in kept}, num_hidden_layers=2, sliding_window=5)
    config._attn_implementation = "eager"
    return strong(torch_device.xp, MistralModel(config)).to(torch_device.device)


def qwen2_5_vl(torch_device, window_size=56):
    """Windows of 4 x 4 patches in layers 0 and 2, whole images in layer 1."""
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    sizes = {"depth": 3, "hidden_size": 160, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 32}
    sizes |= {"fullatt_block_indexes": [1], "window_size": window_size}
    config = Qwen2_5_VLConfig(vision_config=sizes).vision_config
    config._attn_implementation = "eager"
    tower = Qwen2_5_VisionTransformerPretrainedModel(config)
    return strong(torch_device.xp, tower).to(torch_device.device)


def qwen3_vl(torch_device):
    """Every layer attends within whole images; head_dim 72."""
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    sizes = {"depth": 2, "hidden_size": 144, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 32}
    config = Qwen3VLConfig(vision_config={**sizes, "deepstack_visual_indexes": [1]}).vision_config
    config._attn_implementation = "eager"
    return strong(torch_device.xp, Qwen3VLVisionModel(config)).to(torch_device.device)


def see(torch_device, tower, grid=((1, 10, 14), (1, 4, 6), (2, 8, 4))):
    torch = torch_device.xp
    config, generator = tower.config, torch.Generator().manual_seed(1)
    patch = 3 * config.temporal_patch_size * config.patch_size**2
    pixels = torch.randn(sum(t * h * w for t, h, w in grid), patch, generator=generator)
    parameter = next(tower.parameters())
    pixels = pixels.to(parameter.device, parameter.dtype)
    return tower(pixels, grid_thw=torch.tensor(grid, device=pixels.device)).last_hidden_state


LENGTHS = (13, 1, 20, 7)


def read(torch_device, model, lengths=LENGTHS, **extra):
    torch = torch_device.xp
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 100, (1, sum(lengths)), generator=generator).to(torch_device.device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(torch_device.device)
    return model(tokens, position_ids=positions, use_cache=False, **extra).last_hidden_state


class Calls:
    """The operator's calls while it is open: what each was given beside q, k and v."""

    def __init__(self, torch):
        from torch.utils._python_dispatch import TorchDispatchMode

        calls = self.calls = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if "ragged_attention" in str(function):
                    calls.append((args[0].shape, args[3].tolist(), *args[4:7]))
                return function(*args, **(kwargs or {}))

        self.mode = Mode()

    def __enter__(self):
        self.mode.__enter__()
        return self.calls

    def __exit__(self, *error):
        self.mode.__exit__(*error)


def agree(torch_device, integration, model, forward, dtype="float32", reference="float64"):
    """The same model with both implementations; what the operator was called with.

    Both are held against eager attention in float64. Outside attention they round alike, so that the error of eager
    attention in float32 is a measure of what the machine's matrix products leave.
    """
    torch = torch_device.xp
    with torch.inference_mode():
        exact = forward(copy.deepcopy(model).to(getattr(torch, reference)))

        def error(got):
            return float((got.double() - exact).norm() / exact.norm())

        eager = error(forward(model))
        ours = copy.deepcopy(model).to(torch_device.dtype(dtype))
        integration.set_attention(ours)
        with Calls(torch) as calls:
            got = error(forward(ours))
    limit = 5e-2 if dtype != "float32" else max(2e-5 if torch_device.on_cpu else 2e-3, 4 * eager)
    assert got < limit, f"ours {got}, eager in float32 {eager}"
    return calls


IMAGES = [0, 140, 164, 196, 228]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vision_tower_with_packed_windows(torch_device, integration, dtype):
    tower = qwen2_5_vl(torch_device)
    calls = agree(torch_device, integration, tower, lambda model: see(torch_device, model), dtype)
    assert len(calls) == 3  # one a layer, whatever the number of windows
    (shape, windows, longest, *rest), (_, images, *_), third = calls
    assert shape == (228, 2, 80)
    assert images == IMAGES
    # Windows of 4 x 4 patches: those of an image lie within it, and 10 x 14 has odd ones at its borders.
    assert set(IMAGES) <= set(windows)
    lengths = np.diff(windows)
    assert lengths.max() == 16
    assert longest == 16
    assert lengths.sum() == 228
    assert len(windows) - 1 == 3 * 4 + 2 + 2 * 2
    assert rest == ["null", -1]
    assert third == calls[0]


def test_the_windows_matter(torch_device, integration):
    """With other offsets the result is another: the comparison above can fail."""
    torch = torch_device.xp
    with torch.inference_mode():
        exact, other = (see(torch_device, qwen2_5_vl(torch_device, size)) for size in (56, 112))
    assert float((other - exact).norm() / exact.norm()) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vision_tower_of_head_dim_72(torch_device, integration, dtype):
    tower = qwen3_vl(torch_device)
    calls = agree(torch_device, integration, tower, lambda model: see(torch_device, model), dtype)
    assert calls == [((228, 2, 72), IMAGES, 140, "null", -1)] * 2


OFFSETS = [0, 13, 14, 34, 41]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["causal", "sliding"])
def test_packed_text_by_its_positions(torch_device, integration, dtype, windows):
    model = qwen3(torch_device, **windows)
    calls = agree(torch_device, integration, model, lambda model: read(torch_device, model), dtype)
    sliding = ("sliding_window_causal", 8) if windows else ("causal", -1)
    assert [call[1] for call in calls] == [OFFSETS] * 3
    assert [call[3:] for call in calls] == [("causal", -1), sliding, sliding]


def test_packed_text_by_offsets_of_the_caller(torch_device, integration):
    """The same as by positions, and with two equal tensors too; the longest is passed on as a hint."""
    torch = torch_device.xp
    model = qwen3(torch_device, **WINDOWS)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=torch_device.device)

    def forward(model):
        packed = model.config._attn_implementation == integration.IMPLEMENTATION
        extra = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 20, "max_length_k": 20}
        return read(torch_device, model, **(extra if packed else {}))

    calls = agree(torch_device, integration, model, forward)
    assert [call[1:3] for call in calls] == [(OFFSETS, 20)] * 3
    integration.set_attention(model)
    with torch.inference_mode():
        copies = read(torch_device, model, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets.clone())
        assert torch.equal(copies, forward(model))
        with pytest.raises(NotImplementedError, match=r"^cu_seq_lens_k: "):
            read(torch_device, model, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets + 1)


def test_the_windows_of_another_model(torch_device, integration):
    """Mistral: every layer has a window; a window of 5 is 5 keys."""
    model = mistral(torch_device)
    calls = agree(torch_device, integration, model, lambda model: read(torch_device, model))
    assert [call[1:] for call in calls] == [(OFFSETS, None, "sliding_window_causal", 5)] * 2


@pytest.mark.parametrize("side", ["left", "right", "both", "none"])
@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["causal", "sliding"])
def test_a_padded_batch(torch_device, integration, windows, side):
    torch = torch_device.xp
    model = qwen3(torch_device, **windows)
    keep = torch.ones(3, 30, dtype=torch.long, device=torch_device.device)
    if side in ("left", "both"):
        keep[0, :11] = 0
    if side in ("right", "both"):
        keep[1, 4:] = 0
    tokens = torch.randint(0, 100, keep.shape, generator=torch.Generator().manual_seed(1)).to(torch_device.device)

    def forward(model):
        hidden = model(tokens, attention_mask=keep, use_cache=False).last_hidden_state
        assert bool(hidden.isfinite().all())
        return hidden * keep[..., None]  # of padding, nothing is promised

    # In float64 the padding of Transformers' eager attention comes out as NaN.
    calls = agree(torch_device, integration, model, forward, reference="float32")
    expected = {"left": [0, 11, 30, 60, 90], "right": [0, 30, 34, 60, 90], "both": [0, 11, 30, 34, 60, 90]}
    assert [call[1] for call in calls] == [expected.get(side, [0, 30, 60, 90])] * 3


def test_a_prompt_may_fill_a_cache(torch_device, integration):
    """Prompt processing with a cache that is empty before; decoding against it is refused."""
    torch = torch_device.xp
    model = qwen3(torch_device)
    tokens = torch.arange(12, device=torch_device.device)[None]
    with torch.inference_mode():
        eager = model(tokens, use_cache=True)
        integration.set_attention(model)
        ours = model(tokens, use_cache=True)
        torch.testing.assert_close(ours.last_hidden_state, eager.last_hidden_state, rtol=0, atol=2e-2)
        with pytest.raises(NotImplementedError, match=r"^cache: .*use_cache=False"):
            model(tokens[:, :1], cache=ours.past_key_values)


def test_a_compiled_model(torch_device, integration):
    """One graph where the masks are given, as Transformers lets a caller; otherwise it breaks where they are made."""
    torch = torch_device.xp
    model = qwen3(torch_device, **WINDOWS, num_hidden_layers=2)
    integration.set_attention(model)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=torch_device.device)

    def whole(model):
        masks = dict.fromkeys(("full_attention", "sliding_attention"))
        return read(torch_device, model, attention_mask=masks, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)

    with torch.no_grad():
        expected = read(torch_device, model)
        for forward, fullgraph in ((whole, True), (functools.partial(read, torch_device), False)):
            compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
            torch.testing.assert_close(forward(compiled), expected, rtol=0, atol=1e-3)
            torch.compiler.reset()


def test_refusals_by_name(torch_device, integration):
    torch = torch_device.xp
    model = qwen3(torch_device)
    integration.set_attention(model)
    keep = torch.ones(2, 9, dtype=torch.long, device=torch_device.device)
    keep[0, 4] = 0
    tokens = torch.ones_like(keep)
    with torch.inference_mode():
        with pytest.raises(NotImplementedError, match=r"^attention_mask: .*padding inside"):
            model(tokens, attention_mask=keep, use_cache=False)
        with pytest.raises(NotImplementedError, match=r"^attention_mask: .*4 dimensions"):
            model(tokens, attention_mask=torch.zeros(2, 1, 9, 9, device=tokens.device), use_cache=False)
        model.config.attention_dropout = 0.1
        for layer in model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(NotImplementedError, match=r"^dropout: "):
            model.train()(tokens, use_cache=False)
        q = torch.zeros(1, 2, 9, 32, device=tokens.device)
        offsets = torch.tensor([0, 18], dtype=torch.int32, device=tokens.device)
        attend, module = integration._attention, model.layers[0].self_attn.eval()
        bias = q[0, :, 0, 0]
        changes = {"softcap": 30.0, "s_aux": bias, "sinks": bias, "position_bias": bias, "output_attentions": True}
        for name, value in {**changes, "indices": offsets, "block_indices": offsets}.items():
            with pytest.raises(NotImplementedError, match=rf"^{name}: "):
                attend(module, q, q, q, None, **{name: value})
        with pytest.raises(NotImplementedError, match=r"^sliding_window: "):
            attend(module, q, q, q, None, sliding_window=4, is_causal=False)
        with pytest.raises(NotImplementedError, match=r"^cu_seq_lens_q: "):
            attend(module, q.expand(2, -1, -1, -1), *[q.expand(2, -1, -1, -1)] * 2, None, cu_seq_lens_q=offsets)
    with pytest.raises(NotImplementedError, match="grad"):
        model.eval()(tokens, use_cache=False)
    from transformers import BartConfig, BartModel

    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    with pytest.raises(NotImplementedError, match=r"^model: .*decoder"):
        integration.set_attention(BartModel(BartConfig(vocab_size=50, d_model=8, **sizes)))
    with pytest.raises(TypeError, match=r"^model: "):
        integration.set_attention(torch.nn.Linear(2, 2))


def test_masks_of_a_models_own_are_refused(torch_device, integration):
    """What deviates from causal and is not told by offsets must not be passed over."""
    from transformers.masking_utils import create_causal_mask

    torch = torch_device.xp
    config = text_config()
    config._attn_implementation = integration.IMPLEMENTATION
    inputs = torch.zeros(1, 9, 64, device=torch_device.device)

    def mask(**extra):
        return create_causal_mask(config, inputs, None, None, **extra)

    assert mask() is None
    with pytest.raises(NotImplementedError, match=r"^attention_mask: .*own"):
        mask(or_mask_function=lambda batch, head, q, k: k < 3)
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, 1, 1]], device=torch_device.device)
    with pytest.raises(NotImplementedError, match=r"^attention_mask: .*later"):
        mask(block_sequence_ids=blocks)


def test_a_part_of_a_model(torch_device, integration):
    """The vision tower alone: the text model keeps what it had, and decodes."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    text = {name: value for name, value in text_config().to_dict().items() if name in ("hidden_size", "vocab_size")}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    model = Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    before = model.language_model.config._attn_implementation
    integration.set_attention(model.visual)
    assert model.visual.config._attn_implementation == integration.IMPLEMENTATION
    assert model.language_model.config._attn_implementation == before != integration.IMPLEMENTATION
    integration.set_attention(model)
    assert model.language_model.config._attn_implementation == integration.IMPLEMENTATION
