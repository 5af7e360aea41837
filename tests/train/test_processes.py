"""Two processes: DDP and FSDP2 give the results of one process, without deadlocks."""

from functools import partial

import pytest
import torch

from recoup.train.saving.snapshot import read_snapshot
from tests.support import together as cases
from tests.support.processes import ENDED, together

WAYS = {
    "plain": {},
    "regions": {"use_gradient_checkpointing": True},
    "segments": {"use_gradient_checkpointing": True, "checkpoint_segment_size": 2},
    "offload": {"offload": True},
}


def close(one, other, tolerance=1e-6):
    return all(
        torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=tolerance)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("kind", ["replicated", "static", "unused", "sharded"])
@pytest.mark.parametrize("norm", [False, True], ids=["layer norm", "batch norm"])
def test_the_trainer_equals_the_hand_written_loop_in_every_mode(tmp_path, kind, norm):
    options = {"norm": norm, "dropout": 0.2}
    expected = together(cases.train_by_hand, tmp_path, kind, options)
    for name, settings in WAYS.items():
        if (kind, name) == ("sharded", "segments"):
            continue  # refused
        found = together(cases.train, tmp_path, kind, settings, options)
        for one, other in zip(expected, found, strict=True):
            assert not isinstance(other, str), other
            for what, value in one.items():
                assert other[what] == value, (name, what)


def test_segments_across_separately_sharded_units_are_refused(tmp_path):
    settings, options = WAYS["segments"], {"dropout": 0.2}
    for answer in together(cases.train, tmp_path, "sharded", settings, options):
        assert "UnsupportedError" in answer
        assert "got several sharded units" in answer


def test_a_model_that_is_sharded_as_a_whole_may_have_segments(tmp_path):
    kind, options = "sharded whole", {"dropout": 0.2}
    expected = together(cases.train, tmp_path, kind, {}, options)
    found = together(cases.train, tmp_path, kind, WAYS["segments"], options)
    for one, other in zip(expected, found, strict=True):
        assert not isinstance(other, str), other
        assert other == one


FP16 = {"precision": "fp16", "initial_loss_scale": 1024.0}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_gradient_checkpointing": True, "max_gradient_norm": 0.3},
        {"accumulation_steps": 3},
        FP16,
        {**FP16, "use_gradient_checkpointing": True, "max_gradient_norm": 0.3},
    ],
    ids=["plain", "regions and clipping", "accumulation", "fp16", "fp16 with all"],
)
@pytest.mark.parametrize("kind", ["replicated", "static", "sharded"])
def test_two_processes_give_the_result_of_one(tmp_path, kind, settings):
    options = {"dropout": 0.0}
    found = together(cases.train, tmp_path, kind, settings, options)
    assert found[0]["parameters"] == found[1]["parameters"]
    # One process that computes the two shares one after the other: the same sums.
    (twin,) = together(cases.train_by_turns, tmp_path, settings, options, count=1)
    # The norm of a sharded gradient is summed shard by shard. A static graph exchanges
    # every part of its first step, and averages before it accumulates.
    other_order = (kind, *settings) in (
        ("sharded", "use_gradient_checkpointing", "max_gradient_norm"),
        ("static", "accumulation_steps"),
    )
    if other_order:
        assert close(twin["parameters"], found[0]["parameters"])
    else:
        assert twin["parameters"] == found[0]["parameters"]
    if "accumulation_steps" in settings:
        assert found[0]["parts"] == [3, 3, 3]


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_give_the_result_of_one_with_all_samples_in_a_batch(
    tmp_path, kind
):
    # In fp16 this holds to 2.4e-5 only, in torch alone too: gradients of 12 samples are
    # rounded to 16 bits once, those of 6 and 6 samples twice.
    settings, options = {"max_gradient_norm": 0.3}, {"dropout": 0.0}
    (expected,) = together(cases.train, tmp_path, "plain", settings, options, count=1)
    found = together(cases.train, tmp_path, kind, settings, options)
    assert close(expected["parameters"], found[0]["parameters"])
    assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-6)


def test_a_sharded_model_in_bf16_trains(tmp_path):
    settings = {"use_gradient_checkpointing": True}
    plain, regions = (
        together(cases.train, tmp_path, "sharded bf16", way, {"dropout": 0.1})
        for way in ({}, settings)
    )
    assert plain == regions
    assert all(all(result["stepped"]) for result in plain)


@pytest.mark.parametrize("kind", ["replicated", "sharded whole", "sharded"])
def test_processes_agree_on_one_plan_for_the_smallest_budget(tmp_path, kind):
    free = together(cases.train_in_budget, tmp_path, kind, [None, None])
    smallest = int(0.75 * max(free[0]["peaks"]))
    budgets = [f"{2 * smallest}B", f"{smallest}B"]
    found = together(cases.train_in_budget, tmp_path, kind, budgets)
    assert not isinstance(found[0], str), found
    assert [each["budget"] for each in found] == [smallest, smallest]
    assert found[0]["plan"] == found[1]["plan"]
    for one, other in zip(free, found, strict=True):
        assert max(other["peaks"]) <= smallest < max(one["peaks"])
        assert other["losses"] == one["losses"]
        assert other["parameters"] == one["parameters"]


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_memory_is_reserved_for_the_state_of_one_process_only(tmp_path, kind):
    for told, found in together(cases.state_bytes_told_and_found, tmp_path, kind):
        assert told == found


def test_a_plan_for_nested_units_is_refused(tmp_path):
    found = together(
        cases.train_in_budget, tmp_path, "sharded nested", ["1GiB", "1GiB"]
    )
    assert all("UnsupportedError" in each for each in found)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_budget_that_is_too_small_in_one_process_is_refused_in_all(tmp_path, kind):
    found = together(cases.train_in_budget, tmp_path, kind, ["1GiB", "20KiB"])
    assert all("InfeasibleError" in each for each in found)


def test_batches_of_different_sizes_count_by_their_samples(tmp_path):
    found = together(cases.train_uneven, tmp_path)
    (expected,) = together(cases.train_uneven, tmp_path, count=1)
    assert found[0] == found[1]
    assert close(expected, found[0])


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_an_overflow_in_one_process_skips_the_step_in_all(tmp_path, kind):
    first, second = together(cases.overflow, tmp_path, kind)
    assert first["stepped"] == second["stepped"] == [True, False, True]
    assert first["states"] == second["states"]
    assert first["states"][0] == first["states"][1]
    assert first["states"][1] != first["states"][2]
    assert first["scale"] == second["scale"] == 512.0


def test_when_one_process_runs_out_of_memory_all_split_their_batches(tmp_path):
    free = together(cases.run_out_of_memory, tmp_path, 1 << 40)
    tight = together(cases.run_out_of_memory, tmp_path, 22_000)
    assert free[0]["parts"] == [1, 1, 1]
    assert tight[0]["parts"] == tight[1]["parts"]
    assert tight[0]["parts"][0] > 1
    assert tight[0]["parameters"] == tight[1]["parameters"]
    assert close(free[0]["parameters"], tight[0]["parameters"])


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@pytest.mark.parametrize("at", [0, 2])
def test_when_one_process_fails_the_other_does_not_wait(tmp_path, kind, at):
    # A process that waited for the other until gloo gives up would end as hanging.
    first, second = together(cases.fail, tmp_path, kind, at, patience=600)
    assert (first, second) == ("PeerError", ENDED)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_process_lost_while_saving_is_reported_and_the_old_file_stays(tmp_path, kind):
    path = tmp_path / "run"
    first, second = together(cases.lose_a_peer_while_saving, tmp_path, kind, path)
    assert second == ENDED
    assert first == {"error": "PeerError", "steps": 2}
    assert read_snapshot(path)["steps"] == 1


def test_a_trainer_reports_that_its_process_groups_were_destroyed(tmp_path):
    for said in together(cases.go_on_alone, tmp_path):
        assert "destroy_process_group after the last step" in said


@pytest.mark.parametrize("kind", ["static", "sharded"])
def test_impossible_recovery_is_refused_at_construction(tmp_path, kind):
    settings = {"recover_from_out_of_memory": True}
    found = together(cases.train, tmp_path, kind, settings, {})
    assert all("UnsupportedError" in each for each in found)
    assert all("cannot go back" in each for each in found)


def test_half_accumulated_gradients_of_a_sharded_model_are_never_used(tmp_path):
    found = together(cases.fail_while_accumulating, tmp_path)
    assert all("cannot be removed from it" in each for each in found)


def test_an_interrupt_of_one_process_stops_all_after_the_same_step(tmp_path):
    first, second = together(cases.interrupt, tmp_path)
    assert first == second
    assert first["interrupted"]
    assert first["steps"] == 4


def test_data_that_ends_earlier_in_one_process_ends_in_all(tmp_path):
    assert together(cases.uneven_data, tmp_path) == [6, 6]


@pytest.mark.parametrize("kind", ["replicated", "static", "sharded"])
def test_a_process_without_samples_does_not_count(tmp_path, kind):
    (expected,) = together(cases.train_beside_nothing, tmp_path, "plain", count=1)
    found = together(cases.train_beside_nothing, tmp_path, kind)
    assert not isinstance(found[0], str), found
    assert found[0]["parameters"] == found[1]["parameters"]
    assert close(expected["parameters"], found[0]["parameters"])
    assert found[0]["losses"] == pytest.approx(expected["losses"])
    assert all("a step needs samples" in each["refused"] for each in found)


@pytest.mark.parametrize(
    ("every", "stop_at"),
    [(4, 6), (None, 10)],
    ids=["in the middle of an epoch", "at the end of an epoch"],
)
def test_every_process_resumes_with_its_own_order(tmp_path, every, stop_at):
    run = partial(together, cases.fit_in_own_order, tmp_path)
    whole = run(tmp_path / "whole", every, 0)
    run(tmp_path / "run", every, stop_at)
    assert run(tmp_path / "run", every, 0) == whole


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_run_resumes_in_any_number_of_processes(tmp_path, kind):
    whole = together(cases.fit, tmp_path, kind, tmp_path / "whole")
    assert whole[0]["steps"] == 16
    path = tmp_path / "run"
    together(cases.stopped_fit, tmp_path, kind, path, 7)
    content = path.read_bytes()
    # As many processes: the same bits. Another number: sums in another order.
    same = together(cases.fit, tmp_path, kind, path)
    assert same == whole
    for other, count in (("replicated", 1), ("sharded", 2), ("replicated", 3)):
        path.write_bytes(content)
        found = together(cases.fit, tmp_path, other, path, count=count)
        assert found[0]["steps"] == 16
        for what in ("parameters", "averages"):
            assert close(whole[0][what], found[0][what]), (other, count)
