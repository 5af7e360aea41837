"""Fingerprints: equal for equal bits, different for any change."""

import random
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recoup.backend.memory.meters import StorageMeter
from recoup.backend.operators.fingerprints import (
    _BLOCKS,
    _PLACES,
    _weights,
    fingerprint,
    fingerprint_bytes,
    fingerprints_within,
    least_fingerprint_bytes,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
WIDTHS = [torch.complex128, torch.float64, torch.float32, torch.bfloat16, torch.bool]

CPU = torch.device("cpu")


def valuation(number):
    """Return how often two divides a number."""
    return (number & -number).bit_length() - 1


def differ(left, right):
    return bool((fingerprint(left) != fingerprint(right)).any())


class TestEquality:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "shape", [(), (0,), (1,), (7,), (3, 5), (2, 3, 4)], ids=str
    )
    def test_equal_tensors_have_equal_fingerprints(self, dtype, shape):
        tensor = (torch.randn(shape) * 8).to(dtype)
        assert not differ(tensor, tensor.clone())
        assert fingerprint(tensor).dtype is torch.int64
        assert fingerprint(tensor).numel() == 1

    def test_nan_is_equal_to_itself(self):
        tensor = torch.tensor([float("nan"), 1.0])
        assert not differ(tensor, tensor.clone())

    @pytest.mark.parametrize(
        "view",
        [
            lambda t: t,
            lambda t: t.T,
            lambda t: t[1:, ::2],
            lambda t: t[0].expand(4, 6),
            lambda t: t.view(2, 3, 4).permute(2, 0, 1),
        ],
    )
    def test_a_view_is_looked_at_through_its_geometry(self, view):
        first, second = torch.randn(4, 6), torch.randn(4, 6)
        copied = view(first.clone())
        assert not differ(view(first), copied)
        assert differ(view(first), view(second))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("begin", [1, 2, 3, 5])
    def test_where_a_tensor_lies_does_not_matter(self, dtype, begin):
        tensor = (torch.randn(begin + 24) * 8).to(dtype)
        assert not differ(tensor[begin:], tensor[begin:].clone())

    def test_what_a_view_does_not_show_does_not_matter(self):
        first = torch.randn(4, 6)
        second = first.clone()
        second[:, 3:] = 0
        assert not differ(first[:, :3], second[:, :3])

    @pytest.mark.parametrize(
        "view", [lambda t: t.conj(), lambda t: t.conj().imag], ids=["conj", "neg"]
    )
    def test_lazy_views_are_looked_at_as_they_read(self, view):
        tensor = torch.randn(5, dtype=torch.complex64)
        assert not differ(view(tensor), view(tensor).resolve_conj().resolve_neg())


class TestDifference:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("length", [1, 2, 5, 16, 100])
    def test_any_changed_element_is_seen(self, dtype, length):
        tensor = torch.zeros(length).to(dtype)
        for place in range(length):
            changed = tensor.clone()
            changed[place] = 1
            assert differ(tensor, changed)

    def test_one_bit_is_seen(self):
        tensor = torch.randn(1000)
        bits = tensor.view(torch.int32)
        for bit in (0, 1, 22, 30):
            changed = bits.clone()
            changed[617] ^= 1 << bit
            assert differ(tensor, changed.view(torch.float32))

    @pytest.mark.parametrize("dtype", DTYPES[:7], ids=str)
    def test_changed_signs_do_not_cancel(self, dtype):
        tensor = torch.ones(64).to(dtype)
        for places in ([0, 1], [3, 7], [1, 2, 5, 9], list(range(64))):
            changed = tensor.clone()
            changed[places] = -1
            assert differ(tensor, changed)

    def test_zero_and_minus_zero_are_not_the_same_bits(self):
        assert differ(torch.tensor([0.0]), torch.tensor([-0.0]))

    @given(
        first=st.lists(st.booleans(), min_size=1, max_size=64),
        data=st.data(),
    )
    def test_any_other_mask_is_seen(self, first, data):
        length = len(first)
        second = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
        left, right = torch.tensor(first), torch.tensor(second)
        assert differ(left, right) is (first != second)

    @pytest.mark.parametrize("side", [2, 3, 8, 100])
    def test_elements_that_change_places_along_a_rectangle_are_seen(self, side):
        left = torch.zeros(side, side)
        left[0, 0] = left[1, 1] = 1
        right = torch.zeros(side, side)
        right[0, 1] = right[1, 0] = 1
        assert differ(left, right)
        assert differ(left.bool(), right.bool())

    @given(st.permutations(range(12)))
    def test_any_other_order_is_seen(self, order):
        tensor = torch.arange(12)
        assert differ(tensor, tensor[torch.tensor(order)]) is (order != sorted(order))

    @pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("length", [2, 3, 8, 31, 64])
    def test_any_two_elements_that_are_swapped_are_seen(self, dtype, length):
        for first in range(length):
            for second in range(first):
                tensor = torch.zeros(length).to(dtype)
                tensor[first] = 1
                swapped = torch.zeros(length).to(dtype)
                swapped[second] = 1
                assert differ(tensor, swapped)

    def test_places_and_blocks_never_share_a_weight(self):
        weights = torch.cat(
            [_weights(_PLACES, 4096, CPU), _weights(_BLOCKS, 4096, CPU)]
        )
        assert bool((weights % 2 == 1).all())
        assert len(weights.unique()) == len(weights)

    @given(st.integers(0, 2**32), st.permutations(range(8)))
    def test_the_bound_holds_with_shorter_weights(self, seed, order):
        """Eight-bit sums stand for those of 64: every pair of weights is tried."""
        changed = [value - place for place, value in enumerate(order)]
        if not any(changed):
            return
        bits, power = 8, min(valuation(change) for change in changed if change)
        drawn = random.Random(seed)
        weights = [[drawn.randrange(1, 1 << bits, 2) for _ in order] for _ in range(64)]
        # Uniform odd weights cancel with a chance of at most 2**(power + 1 - bits); the
        # first weight that matters is tried with each of its values, the rest drawn.
        place = next(
            place
            for place, change in enumerate(changed)
            if change and valuation(change) == power
        )
        for others in weights:
            rest = sum(
                change * weight
                for index, (change, weight) in enumerate(
                    zip(changed, others, strict=True)
                )
                if index != place
            )
            hits = sum(
                (rest + changed[place] * weight) % (1 << bits) == 0
                for weight in range(1, 1 << bits, 2)
            )
            assert hits <= 1 << power


class TestWeights:
    """A swap in places (b, i) and (c, j) of blocks changes d * (v_b w_i - v_c w_j).

    It is unseen if the powers of two in both factors make up 2**64. Those in d are 31
    at most: so the weights' have to be 33 or more.
    """

    HIDDEN = 33

    def test_no_swap_among_the_first_places_of_the_first_blocks_is_unseen(self):
        places, blocks = _weights(_PLACES, 48, CPU), _weights(_BLOCKS, 48, CPU)
        products = (blocks[:, None] * places).view(-1) & ((1 << self.HIDDEN) - 1)
        assert len(products.unique()) == len(products)

    def test_one_sequence_for_both_would_not_do(self):
        """The test above is shown what it is for."""
        places = _weights(_PLACES, 48, CPU)
        products = (places[:, None] * places).view(-1)
        assert len(products.unique()) < len(products)

    def test_as_few_swaps_inside_a_block_are_unseen_as_by_chance(self):
        weights = _weights(_PLACES, 1 << 21, CPU) & ((1 << self.HIDDEN) - 1)
        _, counts = weights.unique(return_counts=True)
        unseen = int((counts * (counts - 1) // 2).sum())
        # 2**41 pairs, each with a chance of 2**-32: 512, the standard deviation is 23.
        assert abs(unseen - 512) < 6 * 23

    def test_swaps_across_blocks_are_unseen_as_seldom_as_by_chance(self):
        count, generator = 1 << 21, torch.Generator().manual_seed(0)

        def products() -> torch.Tensor:
            place = torch.randint(1 << 21, (count,), generator=generator)
            block = torch.randint(1 << 12, (count,), generator=generator)
            blocks = _weights(_BLOCKS, 1 << 12, CPU)
            return blocks[block] * _weights(_PLACES, 1 << 21, CPU)[place]

        changes = products() - products()
        for power in range(1, 20):
            found = int((changes & ((1 << power) - 1) == 0).sum())
            expected = count / 2 ** (power - 1)  # the difference of odd numbers is even
            assert abs(found - expected) <= 6 * expected**0.5

    def test_permutations_across_blocks_are_seen(self):
        block = 1 << 21
        tensor = torch.arange(3 * block + 5, dtype=torch.int32)
        kept = fingerprint(tensor)
        for first, second in ((0, 1), (0, 2), (1, 2)):
            swapped = tensor.clone()
            places = torch.tensor([first * block + second, second * block + first])
            swapped[places] = tensor[places.flip(0)]
            assert bool(fingerprint(swapped) != kept)
        whole = [0, 1, 2]
        for order in ([1, 0, 2], [2, 1, 0], [1, 2, 0]):
            parts = [tensor[n * block : (n + 1) * block] for n in order]
            assert order != whole
            assert bool(fingerprint(torch.cat([*parts, tensor[-5:]])) != kept)
        assert bool(fingerprint(tensor.roll(1)) != kept)
        assert bool(fingerprint(tensor.flip(0)) != kept)


class TestCost:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("length", [1000, 1001, 100_000, 1 << 20, (1 << 20) + 1])
    def test_it_needs_no_more_memory_than_it_says(self, dtype, length):
        tensor = torch.ones(length).to(dtype)
        with StorageMeter() as meter:
            fingerprint(tensor)
        assert meter.peak_bytes <= fingerprint_bytes(tensor.nbytes) + 600

    @given(st.integers(1, 1 << 40))
    def test_that_is_little_of_a_large_tensor_and_bounded(self, nbytes):
        width = next(width for width in (4, 2, 1) if nbytes % width == 0)
        share = -(-nbytes // width)
        assert fingerprint_bytes(nbytes) <= max(1 << 15, share + 16)
        assert fingerprint_bytes(nbytes) <= 32 << 20

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_one_of_a_tensor_with_gaps_needs_no_copy_of_it(self, dtype):
        tensor = torch.ones(200, 2, 300).to(dtype)[:, 1]
        with StorageMeter() as meter:
            fingerprint(tensor)
        assert meter.peak_bytes <= fingerprint_bytes(tensor.nbytes) + 600


def places(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return tensors of equal elements that lie in memory in several ways."""
    tensor = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0))
    gaps = torch.zeros(*shape, 2, dtype=torch.int64)
    gaps[..., 1] = tensor
    wide = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=torch.int64)
    wide[..., 2:-1] = tensor
    late = torch.zeros(tensor.numel() + 1, dtype=torch.int64)
    late[1:] = tensor.reshape(-1)
    return [tensor, gaps[..., 1], wide[..., 2:-1], late[1:].view(shape)]


def within(free_bytes: int) -> AbstractContextManager[None]:
    return fingerprints_within(lambda: free_bytes)


class TestRoom:
    @pytest.mark.parametrize("dtype", WIDTHS, ids=str)
    @pytest.mark.parametrize("shape", [(3001,), (57, 61), (7, 11, 13), (2, 4001)])
    @pytest.mark.parametrize("free_bytes", [0, 5000, 1 << 30])
    def test_a_fingerprint_is_the_same_in_any_room(self, dtype, shape, free_bytes):
        kept, *others = (each.to(dtype) for each in places(shape))
        expected = fingerprint(kept)
        with within(free_bytes):
            assert fingerprint(kept) == expected
            for other in others:
                assert fingerprint(other) == expected

    @pytest.mark.parametrize("dtype", WIDTHS, ids=str)
    @pytest.mark.parametrize("length", [10, 1000, 1001, 65_537])
    def test_it_takes_no_more_than_the_room_or_the_least(self, dtype, length):
        for tensor in (
            torch.ones(length).to(dtype),
            torch.ones(length, 2).to(dtype)[:, 1],
            torch.ones(length + 1).to(dtype)[1:],
        ):
            least_bytes = least_fingerprint_bytes(tensor.nbytes)
            for room_bytes in (0, least_bytes, 2 * least_bytes, 50_000):
                with StorageMeter() as meter, within(room_bytes):
                    fingerprint(tensor)
                assert meter.peak_bytes <= max(least_bytes, room_bytes)

    def test_the_least_is_a_small_part_of_a_large_tensor(self):
        for nbytes in (1 << 20, 1 << 26, 1 << 30, 1 << 34):
            assert least_fingerprint_bytes(nbytes) <= nbytes // 48

    def test_the_limit_ends_with_the_block(self):
        tensor = torch.ones(1 << 20)
        with within(0):
            pass
        with StorageMeter() as meter:
            fingerprint(tensor)
        assert meter.peak_bytes > least_fingerprint_bytes(tensor.nbytes)
