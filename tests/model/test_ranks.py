"""Tests that tensor-parallel ranks with fused layers, as on GPUs, give what the whole model gives, for each form of
layer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bridle.errors import InvalidRequest, ShardUnavailable
from bridle.lora import LayerShape
from bridle.model import tensor_parallel
from bridle.model.dense_layer import DenseLayer, are_lean, attend_causally
from bridle.model.dense_model import try_lower_model
from bridle.model.device_defaults import choose_devices
from bridle.model.forward_context import attention_handler
from bridle.model.lora_layers import Sites
from bridle.model.tensor_parallel import VocabParallelHead, agree_on_least, share_of_bytes, unsummed
from tests.model.rank_threads import CPU, Ranks, part_of

FAMILIES = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
IDS = torch.tensor([[5, 9, 3, 250, 7, 9, 11]])


def logits_of(model: Any) -> Tensor:
    positions = torch.arange(IDS.shape[1]).unsqueeze(0)
    with torch.inference_mode(), attention_handler(attend_causally):
        found: Tensor = model(input_ids=IDS, position_ids=positions, use_cache=False).logits[0]
    return found


def short_logits(model: Any) -> Tensor:
    with unsummed():
        short = try_lower_model(model)
    assert short is not None
    with torch.inference_mode():
        return short(IDS, torch.arange(IDS.shape[1]).unsqueeze(0), torch.arange(IDS.shape[1]), attend_causally)


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_lean_ranks_give_what_the_whole_model_gives(family: str) -> None:
    want = logits_of(part_of(family, torch.float32, is_lean=False)[0])
    ranks = Ranks(2)

    def work(rank: int) -> tuple[Tensor, int]:
        model, geometry = part_of(family, torch.float32, is_lean=True)
        assert are_lean(model)
        assert geometry.layers[0].num_heads * 2 == model.config.num_attention_heads  # type: ignore[union-attr]
        ranks.sums.clear()  # of the dry forward pass
        ranks.gathers.clear()
        return short_logits(model), len(geometry.layers)

    found = ranks.run(work)
    for have, _ in found:
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    assert len(ranks.sums) == 2 * found[0][1], "trials add up nothing, a pass adds up twice a layer"
    assert ranks.gathers == [(IDS.shape[1], want.shape[1] // 2)], "each has the logits of a half of the tokens"


@pytest.mark.parametrize("count", [2, 3])
def test_a_heads_tokens_are_spread_over_ranks(count: int) -> None:
    """The ranks' parts of the head give all logits, for any division of the vocabulary; a trial computes one rank's
    part."""
    head = torch.nn.Linear(8, 11).requires_grad_(False)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    size = -(-11 // count)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        part = VocabParallelHead(head, rank, count)
        assert part.weight.shape == (size, 8)
        with unsummed():
            alone = part(rows)
        return part(rows.unsqueeze(0))[0], alone

    for rank, (whole, alone) in enumerate(Ranks(count).run(work)):
        torch.testing.assert_close(whole, head(rows))
        assert not alone[:, : rank * size].any()
        torch.testing.assert_close(alone[:, rank * size :][:, :size], head(rows)[:, rank * size :][:, :size])


def test_a_head_of_ranks_takes_a_step_without_logits() -> None:
    """A step without logits, such as the first chunk of a long prompt, passes through a divided head."""
    head = torch.nn.Linear(8, 11).requires_grad_(False)
    for logits in Ranks(2).run(lambda rank: VocabParallelHead(head, rank, 2)(torch.zeros(0, 8))):
        assert logits.shape == (0, 11)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_ranks_need_not_have_the_same_form_of_layers(family: str) -> None:
    """A rank whose fused layers failed their self-test uses other layers and takes part in the same sums."""
    want = logits_of(part_of(family, torch.float32, is_lean=False)[0])

    def work(rank: int) -> Tensor:
        model, _ = part_of(family, torch.float32, is_lean=rank == 0)
        return short_logits(model) if rank == 0 else logits_of(model)

    for have in Ranks(2).run(work):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def test_in_half_precision_ranks_add_up_the_models_own_type() -> None:
    ranks = Ranks(2)
    ranks.run(lambda rank: logits_of(part_of("llama", torch.bfloat16, is_lean=True)[0]))
    assert {dtype for _, dtype in ranks.sums} == {torch.bfloat16}


def test_a_sum_of_unlike_tensors_is_found() -> None:
    with pytest.raises(AssertionError, match="ranks add up"):
        Ranks(2).run(lambda rank: torch.distributed.all_reduce(torch.zeros(2 + rank)))


def test_adapters_find_the_same_layers_in_lean_ranks() -> None:
    """Adapters find the same layers in fused ranks; together the ranks have all inputs and outputs of each layer."""

    def places(is_lean: bool) -> Any:
        def work(rank: int) -> Any:
            sites = Sites(part_of("qwen3", torch.float32, is_lean=is_lean)[0])
            spans = {name: (place.inputs, place.outputs) for name, place in sites.places.items()}
            return sites.layers, spans

        return Ranks(2).run(work)

    lean, plain = places(True), places(False)
    assert lean == plain
    layers, spans = lean[1]
    name = next(name for name in layers if name.endswith("down_proj"))
    assert isinstance(layers[name], LayerShape)
    inputs, outputs = spans[name]
    assert (inputs.begin, inputs.end) == (layers[name].in_features // 2, layers[name].in_features)
    assert outputs.size == layers[name].out_features


def test_the_smallest_decides() -> None:
    assert Ranks(3).run(lambda rank: agree_on_least(70 - 10 * rank, CPU)) == [50, 50, 50]


def test_other_threads_go_on_adding_up() -> None:
    found: list[bool] = []
    with unsummed():
        asked = threading.Thread(target=lambda: found.append(tensor_parallel.is_summing.get()))
        asked.start()
        asked.join()
        assert not tensor_parallel.is_summing.get()
    assert found == [True]
    assert tensor_parallel.is_summing.get()


def test_layers_are_bound_with_their_own_part() -> None:
    def work(rank: int) -> tuple[int, int]:
        layer = part_of("llama", torch.float32, is_lean=True)[0].model.layers[0]  # type: ignore[union-attr, index]
        assert isinstance(layer, DenseLayer)
        return tensor_parallel.share_of(layer.qkv).rank, tensor_parallel.share_of(layer.down).rank

    assert Ranks(2).run(work) == [(0, 0), (1, 1)]


# -- memory ------------------------------------------------------------------------------------------------------


def test_a_rank_keeps_its_part_of_split_layers_and_all_of_others() -> None:
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce"}
    sizes = {
        "model.embed_tokens.weight": 100,
        "model.layers.0.self_attn.q_proj.weight": 300,
        "model.layers.11.self_attn.q_proj.weight": 500,
        "model.layers.11.self_attn.q_norm.weight": 100,
    }
    assert share_of_bytes(sizes, plan, 4) == (100 + 800 / 4 + 100) / 1000
    assert share_of_bytes({}, plan, 4) == 1.0


# -- devices -----------------------------------------------------------------------------------------------------


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


@pytest.mark.usefixtures("three_gpus")
def test_each_rank_has_a_gpu_of_its_own() -> None:
    assert [str(device) for device in choose_devices("auto", 2)] == ["cuda:0", "cuda:1"]
    assert [str(device) for device in choose_devices("cuda:1", 2)] == ["cuda:1", "cuda:2"]
    assert choose_devices("cpu", 4) == [CPU] * 4


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("name", "count", "sentence"),
    [
        ("auto", 4, "shards is 4; each needs a GPU, and there are 3"),
        ("cuda:2", 2, "shards is 2; each needs a GPU, and there are 1 from cuda:2 on"),
    ],
)
def test_more_ranks_than_gpus_are_refused_with_both_numbers(name: str, count: int, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        choose_devices(name, count)
    assert str(refusal.value) == sentence


@pytest.mark.usefixtures("three_gpus")
def test_rank_0_tells_of_missing_gpus_and_the_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from bridle.config import ModelConfig
    from bridle.launch import group

    waited: list[float] = []
    monkeypatch.setattr(group.time, "sleep", waited.append)
    with pytest.raises(InvalidRequest, match="shards is 4; each needs a GPU"):
        group.run_member(ModelConfig("m", device="cuda"), 4, 3, tmp_path / "store")
    assert waited == [group.REFUSAL_SECONDS]


# -- meeting -----------------------------------------------------------------------------------------------------


class Meeting:
    """A fake of `torch.distributed` for the start of ranks, with tensors of the GPU in the host's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: float, error: Exception | None = None) -> None:
        self.options: dict[str, Any] = {}
        self._count, self._error = count, error
        ones = torch.ones
        monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
        monkeypatch.setattr(tensor_parallel, "dist", SimpleNamespace(init_process_group=self.init, all_reduce=self.sum))

    def init(self, backend: str, **options: Any) -> None:
        self.options = {"backend": backend, **options}

    def sum(self, tensor: Tensor) -> None:
        if self._error is not None:
            raise self._error
        tensor.fill_(self._count)


def test_on_gpus_ranks_meet_over_nccl_each_by_its_own_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    meeting, device = Meeting(monkeypatch, 3), torch.device("cuda:2")
    tensor_parallel.join_group(tmp_path / "store", 2, 3, device)
    assert meeting.options["backend"] == "nccl"
    assert meeting.options["device_id"] == device
    assert meeting.options["timeout"].total_seconds() == tensor_parallel.COLLECTIVE_SECONDS
    assert (meeting.options["rank"], meeting.options["world_size"]) == (2, 3)


@pytest.mark.parametrize(
    ("count", "error", "sentence"),
    [
        (
            3,
            RuntimeError("unhandled system error"),
            "rank 2 on cuda:2 cannot reach the other ranks: unhandled system error",
        ),
        (1, None, "rank 2 on cuda:2 counts 1 ranks; must be 3"),
    ],
)
def test_a_rank_whose_nccl_fails_says_so(
    count: int, error: Exception | None, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    Meeting(monkeypatch, count, error)
    with pytest.raises(ShardUnavailable) as failure:
        tensor_parallel.join_group(tmp_path / "store", 2, 3, torch.device("cuda:2"))
    assert str(failure.value) == sentence
