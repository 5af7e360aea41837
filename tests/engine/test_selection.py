"""Selection: the cheapest choice that fits, evenly spread, and obeyed in next steps."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recoup import CheckpointManager, CheckpointScope, keep
from recoup.checkpointing import CheckpointNode
from recoup.engine.scopes.checkpoint_node import Candidate, candidate_of, select

MEBIBYTE = 1 << 20

candidates = st.lists(
    st.builds(Candidate, st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=8
)


@given(candidates, st.integers(0, 100))
def test_the_choice_is_as_cheap_as_the_best_of_all(found, budget_bytes):
    chosen = select(found, budget_bytes)
    total = sum(each.bytes for each in found)
    left = total - sum(found[n].bytes for n in chosen)
    assert left <= budget_bytes
    subsets = itertools.chain.from_iterable(
        itertools.combinations(found, count) for count in range(len(found) + 1)
    )
    best = min(
        sum(each.cost for each in subset)
        for subset in subsets
        if total - sum(each.bytes for each in subset) <= budget_bytes
    )
    assert sum(found[n].cost for n in chosen) == best


@given(st.integers(2, 40), st.integers(1, 40))
def test_alike_ones_leave_even_gaps(count, budget_bytes):
    found = select([Candidate(1, 1)] * count, budget_bytes)
    gaps = [b - a for a, b in itertools.pairwise([-1, *found, count])]
    if len(gaps) > 2:
        assert max(gaps[1:-1]) - min(gaps[1:-1]) <= 1
        assert max(gaps) <= 2 * (sum(gaps) / len(gaps))


@given(
    st.lists(st.integers(1, 10_000), min_size=30, max_size=60, unique=True),
    st.integers(0, 100_000),
)
def test_of_many_kinds_the_rest_fits_too(sizes, budget_bytes):
    found = [Candidate(size, 1 + size % 7) for size in sizes]
    chosen = set(select(found, budget_bytes))
    kept = sum(each.bytes for n, each in enumerate(found) if n not in chosen)
    assert kept <= budget_bytes


def manager_of(mebibytes):
    return CheckpointManager(
        max_memory_mb=mebibytes, memory_threshold=1.0, auto_checkpoint=True
    )


def run(leaves, depth=1):
    """Run a scope for each leaf; return the outputs."""
    outputs = []
    for number, x in enumerate(leaves):
        with CheckpointScope(f"layer{number}"):
            y = x.exp()
            for _ in range(depth):
                y = y.sin()
            outputs.append(y)
    return outputs


def leaves(count=6):
    return [torch.randn(256, 1024, requires_grad=True) for _ in range(count)]


def total(outputs: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([y.sum() for y in outputs]).sum()


class TestQuestions:
    def test_what_counts_is_what_recomputing_spares_not_what_is_held(self):
        x = torch.randn(256, 1024, requires_grad=True)
        with CheckpointScope("little") as little:
            first = x.exp()  # holds x, and spares one tensor
        with CheckpointScope("much") as much:
            second = x.exp().sin().cos().exp()
        found = [candidate_of(node) for node in (*little.nodes, *much.nodes)]
        assert [each.bytes for each in found] == [
            x.nbytes,
            4 * x.nbytes - x.nbytes // 1,
        ]
        del first, second

    def test_without_the_switch_nothing_is_chosen(self):
        manager = manager_of(1)
        with manager:
            outputs = run(leaves())
        manager.auto_checkpoint = False
        assert not any(map(manager.should_checkpoint, manager.nodes))
        manager.auto_checkpoint = True
        assert any(map(manager.should_checkpoint, manager.nodes))
        del outputs

    @pytest.mark.parametrize(("mebibytes", "count"), [(6, 0), (4, 2), (1, 5)])
    def test_a_question_has_the_answer_of_all_together(self, mebibytes, count):
        manager = manager_of(mebibytes)
        with manager:
            outputs = run(leaves())
        answers = [manager.should_checkpoint(node) for node in manager.nodes]
        assert sum(answers) == count
        manager.selective_checkpointing(manager.nodes)
        assert [node.is_checkpoint for node in manager.nodes] == answers
        assert [manager.should_checkpoint(node) for node in manager.nodes] == answers
        del outputs

    def test_a_node_made_by_hand_spares_what_it_holds(self):
        node = CheckpointNode()
        node.save_activations(torch.empty(2 * MEBIBYTE, dtype=torch.uint8))
        assert manager_of(1).should_checkpoint(node)
        assert not manager_of(2).should_checkpoint(node)

    def test_a_region_of_a_managed_model_is_what_its_plan_says(self):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64) for _ in range(8)]
        model = torch.nn.Sequential(*layers)
        manager = manager_of(3)
        with manager:
            for _ in range(2):
                model.zero_grad()
                output = model(torch.ones(1024, 64))
                assert all(map(manager.should_checkpoint, manager.nodes))
                output.sum().backward()
        manager.remove()


class TestNextSteps:
    @pytest.mark.parametrize("registered", [False, True])
    def test_only_what_was_chosen_is_recomputed_from_the_next_step_on(self, registered):
        manager, given_leaves = manager_of(3), leaves()
        scopes = [CheckpointScope(f"layer{n}") for n in range(6)]

        def forward():
            if registered:
                outputs = []
                for scope, x in zip(scopes, given_leaves, strict=True):
                    with scope:
                        outputs.append(x.exp().sin())
                return outputs
            with manager:
                return run(given_leaves)

        if registered:
            for scope in scopes:
                manager.register_scope(scope)
        outputs = forward()
        manager.selective_checkpointing(manager.nodes)
        chosen = [node.is_checkpoint for node in manager.nodes]
        assert sum(chosen) == 3
        total(outputs).backward()
        outputs = []
        for _ in range(2):
            outputs = forward()
            assert [node.is_checkpoint for node in manager.nodes] == chosen
            regions: list[Any] = [node.region for node in manager.nodes]
            total(outputs).backward()
            assert [region.replays for region in regions] == [int(c) for c in chosen]
            del regions
            outputs = []
        manager.auto_checkpoint = False
        outputs = forward()
        regions: list[Any] = [node.region for node in manager.nodes]
        total(outputs).backward()
        assert [region.replays for region in regions] == [1] * 6
        manager.remove()

    def test_one_name_is_told_apart_by_its_order(self):
        manager, given_leaves = manager_of(2), leaves(4)

        def forward():
            outputs = []
            with manager:
                for x in given_leaves:
                    with CheckpointScope("same"):
                        outputs.append(x.exp().sin())
            return outputs

        outputs = forward()
        manager.selective_checkpointing(manager.nodes)
        chosen = [node.is_checkpoint for node in manager.nodes]
        total(outputs).backward()
        del outputs
        outputs = forward()
        regions: list[Any] = [node.region for node in manager.nodes]
        total(outputs).backward()
        assert [region.replays for region in regions] == [int(c) for c in chosen]
        manager.remove()

    def test_a_mark_wins_over_the_choice(self):
        manager, x = manager_of(1), torch.randn(256, 1024, requires_grad=True)

        def forward():
            with manager, CheckpointScope("marked"):
                return keep(x.exp()).sin().cos()

        output = forward()
        manager.selective_checkpointing(manager.nodes)
        output.sum().backward()
        del output
        output = forward()
        [node] = manager.nodes
        assert any(torch.equal(t, x.exp()) for t in node.saved_activations)
        del output
        manager.remove()
