"""What workers keep of images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.mm.rope as rope
from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from pat_vllm.patches.runners import share_image_embeddings, threefold_positions_in
from pat_vllm.patches.weights import kept_input_norms
from pat_vllm.worker.images import clear_deepstack, put_encoder_inputs, without_data


def feature(data: Any) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(data, "image", "a", PlaceholderRange(4, 6))


def runner(tokens: int, *, levels: int = 2) -> Any:
    model = SimpleNamespace(deepstack_input_embeds=[torch.zeros(tokens, 3) for _ in range(levels)])
    encoder = SimpleNamespace(inputs_embeds=torch.zeros(tokens, 3))
    return SimpleNamespace(
        get_model=lambda: model,
        model_state=SimpleNamespace(encoder_runner=encoder),
        requests={},
    )


def test_data_leave_a_state_and_come_back() -> None:
    before = [feature("pixels"), feature("more")]
    (first, second) = stripped = without_data(before)
    assert first.data is second.data is None and first.mm_position == before[0].mm_position
    assert before[0].data == "pixels"  # the source may go on, if the switch fails
    own = runner(4)
    own.requests["r"] = SimpleNamespace(mm_features=stripped)
    put_encoder_inputs(own, {"r": {1: "more"}})  # type: ignore[dict-item]
    assert [each.data for each in own.requests["r"].mm_features] == [None, "more"]


def test_layouts_keep_embeddings_in_one_place() -> None:
    """Each has as many rows as its steps have tokens."""
    host, wider = runner(4), runner(6)
    share_image_embeddings(wider, host)
    for of in (host, wider):
        rows = 4 if of is host else 6
        levels = of.get_model().deepstack_input_embeds
        assert [len(level) for level in levels] == [rows, rows]
        assert len(of.model_state.encoder_runner.inputs_embeds) == rows
    levels = zip(*(of.get_model().deepstack_input_embeds for of in (host, wider)), strict=True)
    assert all(own.data_ptr() == other.data_ptr() for own, other in levels)
    assert len({level.data_ptr() for level in host.get_model().deepstack_input_embeds}) == 2


def test_text_alone_has_nothing_of_this() -> None:
    text: Any = SimpleNamespace(get_model=lambda: SimpleNamespace())
    share_image_embeddings(text, text)
    clear_deepstack(text)


def test_deepstack_is_zero_after_sleep() -> None:
    own = runner(4)
    own.get_model().deepstack_input_embeds[1].fill_(7)
    clear_deepstack(own)
    assert not own.get_model().deepstack_input_embeds[1].any()


def test_layouts_pin_positions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the layout with the most requests, whichever comes first. Model Runner V1 has none."""
    made = []

    class Tensor:
        def __init__(self, size: tuple[int, int], **options: Any) -> None:
            made.append(size)
            self.gpu, self.num_rows = torch.zeros(size), size[0]

    monkeypatch.setattr(rope, "StagedWriteTensor", Tensor)
    kept: list[Any] = []
    taken = []
    for requests in (2, 4):
        of: Any = SimpleNamespace(req_states=None, max_num_reqs=requests)
        with threefold_positions_in(kept, of, most_requests=4):
            taken.append(rope.StagedWriteTensor((3 * requests, 8), dtype=torch.int32))  # type: ignore[call-arg]
    assert made == [(12, 8)]
    assert [(each.num_rows, len(each.gpu)) for each in taken] == [(6, 6), (12, 12)]
    assert taken[0].gpu.data_ptr() == taken[1].gpu.data_ptr()
    with threefold_positions_in(kept, SimpleNamespace(), most_requests=4):  # type: ignore[arg-type]
        assert rope.StagedWriteTensor is Tensor


def test_a_dummy_load_leaves_what_scales_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.custom_op import CustomOp

    monkeypatch.setattr(CustomOp, "dispatch_forward", lambda self, **options: None)
    norm = FusedMMInputNorm([0.5] * 3, [0.5] * 3, 1 / 255)
    model = torch.nn.ModuleDict({"norm": norm, "linear": torch.nn.Linear(2, 2)})
    before = [buffer.clone() for buffer in norm.buffers()]
    assert before
    with kept_input_norms(model), torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    assert all(map(torch.equal, norm.buffers(), before))
    assert all((weight == 7).all() for weight in model["linear"].parameters())
