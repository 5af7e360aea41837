"""Facts about operators, checked against torch's own schemas and kernels."""

import pytest
import torch
from torch._higher_order_ops.cond import cond_op
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.backend.operators import properties as operators
from recoup.backend.operators import repeatable
from recoup.backend.operators.properties import (
    Facts,
    crosses_devices,
    draws,
    draws_outside_generators,
    facts_of,
    gives_permutation,
)

aten = torch.ops.aten


@torch.library.custom_op("test_operators::change_", mutates_args=("x",))
def change_(x: torch.Tensor) -> None:
    """Do whatever a custom operator does to what it is given."""


# Operators that torch makes without initialising them, but not as plain tensors:
# quantized ones have no storage for us, and so are never recorded.
QUANTIZED_FACTORIES = {
    "aten::_empty_affine_quantized",
    "aten::_empty_per_channel_affine_quantized",
    "aten::empty_quantized",
}


def all_overloads():
    """Every overload of every operator of aten."""
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        namespace, _, operator = base.partition("::")
        if namespace == "aten":
            yield getattr(getattr(aten, operator), overload or "default")


ALL = list(all_overloads())
BASES = {overload._schema.name for overload in ALL}


def exists(base: str) -> bool:
    """Whether an operator is there, by itself or only in place."""
    return base in BASES or base + "_" in BASES


class TestLists:
    def test_the_database_of_operators_is_read(self):
        assert len(ALL) > 2000
        assert {"aten::mm", "aten::add_", "aten::empty"} <= BASES

    @pytest.mark.parametrize(
        "listed",
        [
            operators._ASKING,
            operators._KEPT,
            operators._UNINITIALISED,
            operators._OVERWRITING,
            operators._RAGGED,
            operators._RESIZING,
            operators._UPDATING,
        ],
    )
    def test_every_operator_on_a_list_exists(self, listed):
        assert sorted(base for base in listed if not exists(base)) == []

    def test_every_operator_that_leaves_its_output_uninitialised_is_listed(self):
        named = {base for base in BASES if "empty" in base and "::is_" not in base}
        assert named - QUANTIZED_FACTORIES == operators._UNINITIALISED

    def test_every_operator_with_running_statistics_is_known(self):
        """An operator that gets them either updates them, or is one of these."""
        only_reads = {
            # Compositions of listed ones, which arrive in their parts.
            "aten::batch_norm",
            "aten::_batch_norm_impl_index",
            "aten::_batch_norm_impl_index_backward",
            "aten::instance_norm",
            # Inference and backward: they read.
            "aten::_batch_norm_no_update",
            "aten::_native_batch_norm_legit_no_training",
            "aten::batch_norm_elemt",
            "aten::quantized_batch_norm",
            # Returns new statistics and leaves the old ones alone.
            "aten::_native_batch_norm_legit_functional",
            "aten::_batch_norm_with_update_functional",
        }
        found = {
            overload._schema.name
            for overload in ALL
            if any(a.name == "running_mean" for a in overload._schema.arguments)
            and "backward" not in overload._schema.name
        }
        assert found - operators._UPDATING <= only_reads

    @pytest.mark.parametrize("base", sorted(operators._UPDATING))
    def test_statistics_are_found_where_the_schema_has_them(self, base):
        for overload in getattr(aten, base.removeprefix("aten::")).overloads():
            operator = getattr(getattr(aten, base.removeprefix("aten::")), overload)
            facts = facts_of(operator)
            names = [operator._schema.arguments[at].name for at in facts.statistics]
            if "no_stats" in overload:
                assert names == []
                continue
            assert names == ["running_mean", "running_var"]
            if facts.training_at >= 0:
                flag = operator._schema.arguments[facts.training_at]
                assert (flag.name, str(flag.type)) == ("training", "bool")


class TestSchemas:
    def test_an_operator_writes_what_its_schema_says(self):
        for overload in ALL:
            facts = facts_of(overload)
            arguments = overload._schema.arguments
            written = {a.name for a in arguments if a.is_write}
            found = {
                place if isinstance(place, str) else arguments[place].name
                for place in facts.writes
            }
            assert found == written, overload

    def test_a_view_passes_and_an_operator_that_makes_memory_does_not(self):
        wrong = [
            str(overload)
            for overload in ALL
            if overload.is_view and not facts_of(overload).passes
        ]
        assert wrong == []
        for operator in (aten.clone.default, aten.exp.default, aten.mm.default):
            assert not facts_of(operator).passes

    @pytest.mark.parametrize(
        "operator",
        [aten.t_.default, aten.squeeze_.default, aten.transpose_.default],
        ids=str,
    )
    def test_a_change_of_geometry_in_place_passes(self, operator):
        assert facts_of(operator).passes

    @pytest.mark.parametrize(
        "operator", [aten.resize_.default, aten.resize_as_.default], ids=str
    )
    def test_a_change_of_size_does_not_pass(self, operator):
        assert not facts_of(operator).passes

    def test_an_operator_that_torch_calls_random_is_random(self):
        for overload in ALL:
            tagged = torch.Tag.nondeterministic_seeded in overload.tags
            takes = any("Generator" in str(a.type) for a in overload._schema.arguments)
            if tagged or takes:
                assert facts_of(overload).random, overload

    @pytest.mark.parametrize(
        "operator",
        [
            aten.native_dropout.default,
            aten.bernoulli_.float,
            aten.randn.default,
            aten.rand_like.default,
            aten.normal_.default,
            aten.randperm.default,
            aten.multinomial.default,
            aten.rrelu_with_noise.default,
        ],
        ids=str,
    )
    def test_what_draws_is_random(self, operator):
        assert facts_of(operator).random

    def test_results_that_come_into_given_tensors_overwrite_them(self):
        facts = facts_of(aten.exp.out)
        assert (facts.writes, facts.overwrites) == (("out",), True)
        facts = facts_of(aten.add_.Tensor)
        assert (facts.writes, facts.overwrites) == ((0,), False)

    def test_an_operator_that_returns_more_than_it_writes_is_told(self):
        assert facts_of(aten._native_batch_norm_legit.default).makes_more
        assert not facts_of(aten.add_.Tensor).makes_more
        assert not facts_of(aten.exp.out).makes_more

    @pytest.mark.parametrize(
        "operator", [aten.mm.default, aten.exp.default, aten.gelu.default], ids=str
    )
    def test_plain_functions_are_simple(self, operator):
        assert facts_of(operator).simple

    @pytest.mark.parametrize(
        "operator",
        [
            aten.view.default,
            aten.add_.Tensor,
            aten.native_dropout.default,
            aten.empty.memory_format,
            aten.topk.default,
            aten.native_batch_norm.default,
            aten.index_add.default,
            aten.mkldnn_rnn_layer.default,
        ],
        ids=str,
    )
    def test_all_others_are_not(self, operator):
        assert not facts_of(operator).simple

    @pytest.mark.parametrize(
        ("operator", "in_place"),
        [
            (aten.add_.Tensor, True),
            (aten.relu_.default, True),
            (aten.masked_fill_.Scalar, True),
            (aten.add.Tensor, False),
            (aten.add.out, False),
            (aten.zero_.default, False),
            (aten.copy_.default, False),
            (aten.bernoulli_.float, False),
            (aten.index_add_.default, False),
            (aten.resize_.default, False),
            (aten.t_.default, False),
            (aten.set_data.default, False),
            (aten._foreach_add_.Scalar, False),
            (torch.ops.test_operators.change_.default, False),
        ],
        ids=str,
    )
    def test_some_only_change_what_is_in_their_first_argument(self, operator, in_place):
        assert facts_of(operator).in_place == in_place

    @pytest.mark.parametrize(
        ("operator", "resizes"),
        [
            (aten.add_.Tensor, False),
            (aten.zero_.default, False),
            (aten.exp.default, False),
            (aten.exp.out, True),
            (aten.resize_.default, True),
            (torch.ops.test_operators.change_.default, True),
        ],
        ids=str,
    )
    def test_some_may_resize_what_they_write_to(self, operator, resizes):
        assert facts_of(operator).resizes == resizes

    def test_some_only_take_memory(self):
        assert facts_of(aten.empty.memory_format).blank
        assert facts_of(aten.empty_strided.default).blank
        assert not facts_of(aten.empty_like.default).blank
        assert not facts_of(aten.zeros.default).blank
        assert not facts_of(aten.resize_.default).blank

    def test_some_only_move_statistics_that_they_do_without(self):
        assert facts_of(aten.native_batch_norm.default).moves_statistics
        assert facts_of(aten.cudnn_batch_norm.default).moves_statistics
        assert not facts_of(aten._native_batch_norm_legit.default).moves_statistics
        assert not facts_of(aten.native_batch_norm.out).moves_statistics
        assert not facts_of(aten.native_layer_norm.default).moves_statistics


class TestKept:
    @pytest.mark.parametrize(
        "operator",
        [
            aten.item.default,
            aten._local_scalar_dense.default,
            aten.multinomial.default,
            aten._ctc_loss.default,
            aten.linalg_lstsq.default,
        ],
        ids=str,
    )
    def test_what_python_reads_draws_or_is_partly_unwritten_is_kept(self, operator):
        assert facts_of(operator).opaque

    @pytest.mark.parametrize(
        "operator",
        [aten.topk.default, aten.nonzero.default, aten._unique2.default],
        ids=str,
    )
    def test_choices_are_kept_only_where_they_may_vary(self, operator):
        facts = facts_of(operator)
        assert (facts.opaque, facts.may_vary) == (False, True)

    def test_shapes_that_depend_on_data_are_kept_unless_they_are_known(self):
        known = repeatable.GATHERING | repeatable.CHOOSING
        for overload in ALL:
            if torch.Tag.dynamic_output_shape in overload.tags:
                is_known = overload._schema.name in known
                assert facts_of(overload).opaque != is_known, overload
            if torch.Tag.data_dependent_output in overload.tags:
                assert facts_of(overload).opaque, overload

    def test_an_unknown_librarys_shapes_that_depend_on_data_are_kept(self):
        tags = [torch.Tag.dynamic_output_shape]
        with torch.library._scoped_library("recoup_shapes", "DEF") as library:
            library.define("choose(Tensor x) -> Tensor", tags=tags)
            assert facts_of(torch.ops.recoup_shapes.choose.default).opaque

    @pytest.mark.parametrize(
        ("operator", "place", "permutes"),
        [
            (aten.sort.default, 1, True),
            (aten.sort.stable, 1, True),
            (aten.randperm.default, None, True),
            (aten.sort.default, 0, False),
            (aten.topk.default, 1, False),
            (aten.arange.default, None, False),
        ],
    )
    def test_places_of_a_sort_are_a_permutation(self, operator, place, permutes):
        assert gives_permutation(facts_of(operator), place) == permutes

    def test_collectives_are_kept(self):
        collectives = pytest.importorskip("torch.distributed._functional_collectives")
        assert collectives is not None
        for operator in (
            torch.ops._c10d_functional.all_reduce.default,
            torch.ops._c10d_functional.wait_tensor.default,
        ):
            assert facts_of(operator).opaque

    def test_higher_order_operators_are_kept(self):
        assert facts_of(cond_op).opaque

    def test_collectives_of_process_groups_write_to_their_first_argument(self):
        pytest.importorskip("torch.distributed")
        for name in ("allreduce_", "broadcast_", "allgather_", "recv_", "alltoall_"):
            facts = facts_of(getattr(torch.ops.c10d, name).default)
            assert (facts.writes, facts.opaque) == ((0,), True), name
        for name in ("send", "barrier"):
            facts = facts_of(getattr(torch.ops.c10d, name).default)
            assert (facts.writes, facts.opaque) == ((), True), name

    def test_torchs_own_operators_are_believed_and_those_of_others_are_not(self):
        assert not any(facts_of(overload).is_unproven for overload in ALL)
        assert not any(facts_of(overload).may_draw for overload in ALL)
        with torch.library._scoped_library("recoup_others", "DEF") as library:
            library.define("read(Tensor x) -> Tensor")
            library.define("write(Tensor(a!) x) -> ()")
            library.define("number(int x) -> int")
            made = torch.ops.recoup_others
            assert facts_of(made.read.default).is_unproven
            assert not facts_of(made.write.default).is_unproven
            assert not facts_of(made.number.default).is_unproven

    def test_a_custom_operator_is_judged_by_its_schema(self):
        with torch.library._scoped_library("recoup_facts", "DEF") as library:
            library.define("plain(Tensor x) -> Tensor")
            library.define("write(Tensor(a!) x, *, Tensor(b!) y) -> ()")
            library.define(
                "draw(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded]
            )
            namespace = torch.ops.recoup_facts
            assert facts_of(namespace.plain.default) == Facts(
                name="recoup_facts.plain.default",
                makes_more=True,
                is_unproven=True,
                may_draw=True,
            )
            assert facts_of(namespace.write.default).writes == (0, "y")
            assert facts_of(namespace.draw.default).random
            assert not facts_of(namespace.draw.default).may_draw


class TestRecurrentLayers:
    def workspace_bytes(self, *, grad):
        """What oneDNN's recurrent layer leaves for backward."""
        found = []

        class Workspace(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if func is aten.mkldnn_rnn_layer.default:
                    found.append(0 if out[3] is None else out[3].nbytes)
                return out

        layer, x = torch.nn.LSTM(4, 4), torch.randn(3, 2, 4)
        with torch.set_grad_enabled(grad), Workspace():
            layer(x)
        return found

    def test_the_workspace_is_made_only_in_gradient_mode(self):
        with_grad = self.workspace_bytes(grad=True)
        if not with_grad:
            pytest.skip("this build of torch does not use oneDNN for recurrent layers")
        assert with_grad[0] > 0
        assert self.workspace_bytes(grad=False) in ([], [0])
        assert facts_of(aten.mkldnn_rnn_layer.default).asks_gradient_mode

    def test_the_workspace_is_where_it_is_looked_for(self):
        returns = aten.mkldnn_rnn_layer.default._schema.returns
        assert len(returns) == 4
        assert facts_of(aten.mkldnn_rnn_layer.default).ragged == (3,)


class TestOverwriting:
    @pytest.mark.parametrize(
        "base", sorted(operators._OVERWRITING - {"aten::copy_", "aten::fill_"})
    )
    def test_what_was_there_does_not_matter(self, base):
        method = getattr(torch.Tensor, base.removeprefix("aten::"))
        arguments = (0.5,) if "geometric" in base else ()

        def result(garbage):
            torch.manual_seed(0)
            return method(torch.full((64,), garbage), *arguments)

        assert torch.equal(result(float("nan")), result(7.0))

    def test_copying_and_filling_overwrite_too(self):
        for garbage in (float("nan"), 7.0):
            target = torch.full((3,), garbage)
            assert torch.equal(target.clone().copy_(torch.ones(3)), torch.ones(3))
            assert torch.equal(target.clone().fill_(2.0), torch.full((3,), 2.0))


class TestCalls:
    def test_a_copy_between_devices_is_told(self):
        here, there = torch.ones(3), torch.ones(3, device="meta")
        assert crosses_devices((here,), there)
        assert not crosses_devices((here, 3, None), torch.ones(3))
        assert not crosses_devices((torch.ones(()),), there)
        assert not crosses_devices((here,), (there,))

    @pytest.mark.parametrize(
        ("args", "kwargs", "expected"),
        [
            (("q", "k", "v"), {}, False),
            (("q", "k", "v", 0.0), {}, False),
            (("q", "k", "v", 0.5), {}, True),
            (("q", "k", "v"), {"dropout_p": 0.5}, True),
        ],
    )
    def test_attention_draws_only_with_dropout(self, args, kwargs, expected):
        facts = facts_of(aten._scaled_dot_product_flash_attention.default)
        assert facts.random
        assert draws(facts, args, kwargs) is expected

    def test_other_random_operators_always_draw(self):
        assert draws(facts_of(aten.randn.default), ([3],), {})
        assert not draws(facts_of(aten.exp.default), (), {})

    def test_every_attention_that_draws_has_its_rate_where_it_is_looked_for(self):
        for overload in ALL:
            named = {a.name for a in overload._schema.arguments}
            if "dropout_p" in named and facts_of(overload).random:
                at = facts_of(overload).dropout_at
                assert overload._schema.arguments[at].name == "dropout_p"

    def test_statistics_may_be_left_out(self):
        assert facts_of(aten.native_batch_norm.default).nullable == (3, 4)
        assert facts_of(aten._native_batch_norm_legit.default).nullable == ()

    def test_cudnn_keeps_its_own_state_of_dropout(self):
        recurrent = facts_of(aten._cudnn_rnn.default)
        assert draws_outside_generators(recurrent, (1, 0.5))
        assert not draws_outside_generators(recurrent, (1, 0.0))
        assert not draws_outside_generators(facts_of(aten.exp.default), (1, 0.5))
        assert any(
            a.name == "dropout" for a in aten._cudnn_rnn.default._schema.arguments
        )
