"""Modelled profiles: possible, labelled, and ordered as hardware is."""

import pytest

from pat_vllm.cli.held_out import held_out_error
from pat_vllm.layout import Layout
from pat_vllm.model_size import MODEL_SHAPES
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profiling.profile import Profile, StepShape
from pat_vllm.simulator.modelled.figures import gpu_names
from pat_vllm.simulator.modelled.hardware import modelled_profile


def sizes(profile):
    return tuple(layout.tp for layout in profile.layouts)


def seconds(profile, tp, batch, each, prefill=0):
    (found,) = (
        s.seconds
        for s in profile.steps
        if (s.layout.tp, s.batch, s.context, s.prefill) == (tp, batch, batch * each, prefill)
    )
    return found


@pytest.fixture(scope="module")
def h100():
    return modelled_profile("llama-3.1-8b", "H100", 8)


@pytest.mark.parametrize("gpu", gpu_names())
@pytest.mark.parametrize("model", MODEL_SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_every_combination_is_a_valid_labelled_profile(model, gpu, ranks, tmp_path):
    if (model, gpu, ranks) == ("qwen3-30b-a3b", "A40", 1):
        pytest.skip("61 GB of weights do not fit")
    profile = modelled_profile(MODEL_SHAPES[model], gpu, ranks)
    assert profile.kind == "modelled"
    assert "modelled" in profile.title and model in profile.title and gpu in profile.title
    assert profile.key["modelled"] is True
    assert (profile.key["gpu"], profile.key["model"]) == (gpu, model)
    assert "not measured" in profile.note and "datasheet" in profile.note
    assert max(profile.layouts).tp <= 8
    pairs = {(s.source, s.target) for s in profile.switches}
    assert pairs == {(a, b) for a in profile.layouts for b in profile.layouts if a != b}
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


def test_widening_helps_one_request_and_replicas_help_many(h100):
    times = [seconds(h100, tp, 1, 2048) for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[-1] > 2
    # 1024 requests: 128 on each of eight replicas are faster than two rounds of 256 on four ranks.
    eight = 8 * 128 / seconds(h100, 1, 128, 512)
    one = 256 / seconds(h100, 8, 256, 512)
    assert eight > one


def test_absolute_times_are_near_what_such_machines_reach(h100):
    # Reading 15 GB of weights at 3.35 TB/s takes 4.5 ms; nothing is faster, and no engine is
    # twice as slow.
    assert 4.5e-3 < seconds(h100, 1, 1, 512) < 9e-3
    a40 = modelled_profile("llama-3.1-8b", "A40", 8)
    assert 21e-3 < seconds(a40, 1, 1, 512) < 42e-3


def test_steps_take_longer_with_more_work_and_fit_in_memory(h100):
    for s in h100.steps:
        assert s.context + s.prefill <= h100.kv_tokens[s.layout.tp]
        assert s.batch + s.prefill <= h100.max_batch_tokens[s.layout.tp]
        assert s.batch <= h100.max_num_seqs[s.layout.tp]
    assert seconds(h100, 1, 8, 512) < seconds(h100, 1, 8, 2048) < seconds(h100, 1, 64, 2048)
    assert seconds(h100, 2, 0, 0, 512) < seconds(h100, 2, 0, 0, 8192)
    assert seconds(h100, 2, 8, 1024) < seconds(h100, 2, 8, 1024, 512)


def test_kv_memory_grows_faster_than_the_ranks(h100):
    for tp in (1, 2, 4):
        assert h100.kv_tokens[2 * tp] > 2 * h100.kv_tokens[tp]
    assert h100.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2


def test_replicated_kv_heads_save_no_memory():
    tiny = {**MODEL_SHAPES["llama-3.1-8b"], "num_key_value_heads": 2}
    profile = modelled_profile(tiny, "H100", 8)
    # From tp=2 on every rank holds one head; only the weights shrink.
    assert profile.kv_tokens[4] < 1.3 * profile.kv_tokens[2]


def test_layouts_that_are_impossible_are_left_out():
    qwen = MODEL_SHAPES["qwen3-14b"]
    assert sizes(modelled_profile(qwen, "H100", 16, node_size=16)) == (1, 2, 4, 8)
    llama = MODEL_SHAPES["llama-3.1-8b"]
    assert sizes(modelled_profile(llama, "H100", 16)) == (1, 2, 4, 8)
    assert sizes(modelled_profile(llama, "H100", 16, node_size=16)) == (1, 2, 4, 8, 16)
    assert sizes(modelled_profile(llama, "H100", 8, layouts=[8, 2])) == (2, 8)
    big = {**llama, "num_hidden_layers": 200}
    assert sizes(modelled_profile(big, "H100", 8)) == (2, 4, 8)


def test_switches_move_what_changes_ranks(h100):
    moved = {
        (s.source.tp, s.target.tp): s.kv_bytes / s.tokens / h100.kv_bytes_per_token
        for s in h100.switches
    }
    for wide in (2, 4, 8):
        # The rank that held a request keeps its share of the heads; the others leave it.
        assert moved[1, wide] == pytest.approx(1 - 1 / wide, abs=1e-6)
    for (source, target), share in moved.items():
        assert 1 - min(source, target) / max(source, target) - 1e-6 <= share < 1
        assert share == pytest.approx(moved[target, source], abs=1e-6)
    for s in h100.switches:
        assert s.seconds == pytest.approx(h100.key["switch_fixed"] + s.kv + s.weights)


def test_a_slower_link_makes_wide_steps_and_switches_slower(h100):
    pcie = modelled_profile("llama-3.1-8b", "H100", 8, link="pcie")
    assert seconds(pcie, 8, 1, 512) > seconds(h100, 8, 1, 512)
    assert seconds(pcie, 1, 1, 512) == seconds(h100, 1, 1, 512)
    for slow, fast in zip(pcie.switches, h100.switches, strict=True):
        assert slow.kv > fast.kv and slow.weights == fast.weights


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-3.1-8b", "B9000", 8), "A40, H100, H200"),
        (("gpt-5", "H100", 8), "llama-3.1-8b, qwen3-14b"),
        (({"hidden_size": 8}, "H100", 8), "num_hidden_layers"),
        (("llama-3.1-8b", "H100", 0), "ranks"),
    ],
)
def test_unknown_names_are_errors_that_list_the_known(arguments, message):
    with pytest.raises(ValueError, match=message):
        modelled_profile(*arguments)


def test_impossible_options_are_errors():
    with pytest.raises(ValueError, match="nvlink"):
        modelled_profile("llama-3.1-8b", "A40", 8, link="nvlink")
    with pytest.raises(ValueError, match="no layout"):
        modelled_profile("llama-3.1-8b", "A40", 8, memory_fraction=0.1, layouts=[1, 3])


@pytest.mark.parametrize(("model", "gpu"), [("llama-3.1-8b", "H100"), ("qwen3-14b", "A40")])
def test_the_step_time_model_fits_it(model, gpu):
    profile = modelled_profile(model, gpu, 8)
    for error in held_out_error(profile).values():
        assert error.mean() <= 0.03
    times = StepTimeModel.fit(profile)
    steps = [times.step(layout, StepShape(1, 3000, 3000)) for layout in profile.layouts]
    assert steps == sorted(steps, reverse=True)
    assert Layout.of(8, 8) in profile.layouts


def drafted(profile, tp, batch, each, k, drafts):
    (found,) = (
        s.seconds
        for s in profile.steps
        if (s.layout.tp, s.batch, s.context, s.k, s.drafts, s.prefill)
        == (tp, batch, batch * each, k, drafts, 0)
    )
    return found


def test_drafts_cost_nothing_while_a_step_reads_and_much_when_it_computes():
    lengths = (1, 2, 4, 7)
    free = modelled_profile("llama-3.1-8b", "H100", 8, draft_lengths=lengths)
    plain = [s for s in free.steps if not s.k]
    assert tuple(plain) == modelled_profile("llama-3.1-8b", "H100", 8).steps
    assert "modelled" in free.title and "A drafter takes 0.0 ms" in free.note
    for tp in sizes(free):
        alone = drafted(free, tp, 1, 2048, 0, 0)
        for k in lengths:
            assert drafted(free, tp, 1, 2048, k, 0) == alone
            assert drafted(free, tp, 1, 2048, k, k) == pytest.approx(alone, rel=0.02)
    # 1024 tokens are more than the 200 or so for which reading the weights takes as long.
    assert drafted(free, 1, 128, 512, 7, 7 * 128) > 1.5 * drafted(free, 1, 128, 512, 0, 0)
    times = [drafted(free, 1, 128, 512, k, k * 128) for k in (0, *lengths)]
    assert times == sorted(times)
    # The context is read once and attended to by each token.
    assert drafted(free, 1, 8, 16384, 1, 8) < 1.1 * drafted(free, 1, 8, 16384, 0, 0)


def test_drafting_takes_what_is_said():
    free, dear = (
        modelled_profile("llama-3.1-8b", "H100", 8, draft_lengths=(4,), drafting=cost)
        for cost in (0.0, 1e-3)
    )
    assert "A drafter takes 1.0 ms" in dear.note and dear.key != free.key
    for one, other in zip(free.steps, dear.steps, strict=True):
        assert other.seconds - one.seconds == pytest.approx(1e-3 if one.k else 0.0, abs=1e-9)
    with pytest.raises(ValueError, match="not below 0"):
        modelled_profile("llama-3.1-8b", "H100", 8, draft_lengths=(4,), drafting=-1e-3)
