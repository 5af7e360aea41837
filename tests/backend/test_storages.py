"""Storage identity and geometry, as torch has them."""

import pytest
import torch

from recoup.backend.memory.storages import (
    QUANTIZED,
    copy_storage,
    fitted,
    flat,
    free_weak_reference,
    geometry_of,
    has_storage,
    is_dense,
    lazy_bits,
    shaped,
    storage_address,
    take_weak_reference,
    version_of,
)
from tests.support.watching import Memory

VIEWS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.T,
    "slice": lambda t: t[1:, ::2],
    "offset": lambda t: t[2],
    "expanded": lambda t: t[0].expand(3, 6),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[1, 1],
    "reshaped": lambda t: t.view(2, 3, 4),
    "other type": lambda t: t.view(torch.int32),
    "complex": torch.view_as_complex,
    "conjugate": lambda t: torch.view_as_complex(t).conj(),
    "negative": lambda t: torch.view_as_complex(t).conj().imag,
    "both": lambda t: torch.view_as_complex(t).conj()[:2].mT,
}


def base(name):
    shape = (
        (4, 6, 2) if name in ("complex", "conjugate", "negative", "both") else (4, 6)
    )
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


class TestIdentity:
    def test_views_and_aliases_share_an_address(self):
        x = torch.zeros(4, 6, requires_grad=True)
        for alias in (x[1:], x.T, x.detach(), x.data, x.view(-1), x.expand(2, 4, 6)):
            assert storage_address(alias) == storage_address(x)
        assert storage_address(x.clone()) != storage_address(x)

    def test_the_alias_that_autograd_saves_shares_the_address(self):
        seen = []

        def pack(tensor):
            seen.append(storage_address(tensor))
            return tensor.detach()

        x = torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = x.exp().sin()
        assert seen[0] == seen[1] != storage_address(x)
        del y

    def test_a_weak_reference_pins_the_address_and_not_the_memory(self):
        x = torch.zeros(1000)
        memory = Memory(x)
        address = take_weak_reference(x.untyped_storage())
        assert address == storage_address(x) == x.untyped_storage()._cdata
        del x
        assert memory.is_freed
        others = [torch.zeros(1000) for _ in range(50)]
        assert address not in {storage_address(other) for other in others}
        free_weak_reference(address)

    def test_without_the_pin_an_address_is_used_again(self):
        # Why the pin is needed at all: if this fails, it is not.
        addresses = set()
        for _ in range(50):
            addresses.add(storage_address(torch.zeros(1000)))
        assert len(addresses) < 50

    # Torch calls some layouts young and quantization old.
    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
    @pytest.mark.parametrize(
        "make",
        [
            lambda t: t.to_sparse(),
            lambda t: t.to_sparse_csr(),
            lambda t: t.to_sparse_csc(),
            lambda t: t.to_mkldnn(),
            lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        ],
        ids=["coo", "csr", "csc", "mkldnn", "quantized"],
    )
    def test_a_tensor_that_is_not_one_plain_storage_has_none(self, make):
        assert not has_storage(make(torch.eye(3)))

    def test_a_plain_tensor_has_a_storage(self):
        assert has_storage(torch.zeros(3))
        assert has_storage(torch.zeros(0))
        assert has_storage(torch.nn.Parameter(torch.zeros(3)))

    def test_a_sparse_tensor_has_no_address(self):
        with pytest.raises(NotImplementedError):
            storage_address(torch.eye(3).to_sparse())

    def test_every_quantized_type_is_known(self):
        named = {
            value
            for name, value in vars(torch).items()
            if isinstance(value, torch.dtype) and name.startswith(("q", "quint"))
        }
        assert named == QUANTIZED


class TestVersions:
    def test_writes_through_any_alias_move_the_version(self):
        x = torch.zeros(4)
        before = version_of(x)
        x[1:].add_(1)
        assert version_of(x) == before + 1
        assert version_of(x.detach()) == version_of(x)

    def test_an_inference_tensor_has_no_version(self):
        with torch.inference_mode():
            x = torch.zeros(4)
        assert version_of(x) == -1

    def test_a_write_through_data_is_not_seen(self):
        # Why values are checked by fingerprint as well.
        x = torch.zeros(4)
        before = version_of(x)
        x.data.add_(1)
        assert version_of(x) == before


class TestGeometry:
    @pytest.mark.parametrize("name", VIEWS)
    def test_a_geometry_restores_the_view_from_the_storage(self, name):
        whole = base(name)
        view = VIEWS[name](whole)
        geometry = geometry_of(view)
        for source in (whole, flat(whole)):
            found = shaped(source, geometry)
            assert geometry_of(found) == geometry
            assert storage_address(found) == storage_address(whole)
            assert torch.equal(found, view)

    @pytest.mark.parametrize("name", VIEWS)
    def test_a_whole_is_restored_from_a_view(self, name):
        whole = base(name)
        view = VIEWS[name](whole)
        assert torch.equal(shaped(view, geometry_of(whole)), whole)

    @pytest.mark.parametrize("name", VIEWS)
    def test_a_tensor_that_fits_is_returned_as_it_is(self, name):
        view = VIEWS[name](base(name))
        geometry = geometry_of(view)
        assert fitted(view, geometry) is view
        other = flat(base(name))
        assert geometry_of(fitted(other, geometry)) == geometry

    def test_lazy_bits_say_how_a_view_reads_its_memory(self):
        x = torch.view_as_complex(torch.ones(3, 2))
        assert lazy_bits(x) == 0
        assert lazy_bits(x.conj()) == 1
        assert lazy_bits(x.conj().imag) == 2
        assert lazy_bits(torch.ops.aten._neg_view(x.conj())) == 3

    @pytest.mark.parametrize("name", VIEWS)
    def test_a_copy_has_the_geometry_and_its_own_memory(self, name):
        whole = base(name)
        view = VIEWS[name](whole)
        copied = copy_storage(view)
        assert geometry_of(copied) == geometry_of(view)
        assert torch.equal(copied, view)
        assert storage_address(copied) != storage_address(whole)
        assert copied.untyped_storage().nbytes() == whole.untyped_storage().nbytes()

    def test_flat_shows_all_bytes_of_the_storage(self):
        x = torch.arange(12.0).view(3, 4)
        assert torch.equal(flat(x[1:, 2:]), torch.arange(12.0))

    @pytest.mark.parametrize(
        ("view", "dense"),
        [
            (lambda t: t, True),
            (lambda t: t.T, True),
            (lambda t: t.view(2, 3, 4).permute(2, 0, 1), True),
            (lambda t: t[1:], True),
            (lambda t: t[:, 1:], False),
            (lambda t: t[0].expand(4, 6), False),
            (lambda t: t[::2], False),
            (lambda t: t[0, :1], True),
            (lambda t: t[:, :1], False),
        ],
    )
    def test_dense_views_are_told_from_others(self, view, dense):
        assert is_dense(view(torch.zeros(4, 6))) is dense
