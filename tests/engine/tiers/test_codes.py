"""Half, 8 bit and packed: what comes back, at the edges of what numbers can be."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recoup import CheckpointScope, Device, EightBit, Half, Host, Packed
from recoup.engine.tiers import eight_bit, half, packed
from recoup.errors import UsageError
from recoup.tiers import ExactTier, LossyTier
from tests.support.bits import bits

HOST = Host(smallest_bytes=0)
LIMIT = {torch.float16: 65504.0, torch.bfloat16: torch.finfo(torch.bfloat16).max}
EDGES = [
    0.0,
    -0.0,
    1.0,
    -1 / 3,
    65504.0,
    65519.9,
    65520.0,
    7e4,
    -7e4,
    6.1e-5,
    5.9e-8,
    2.9e-8,
    1e-40,
    3.4e38,
    -3.4e38,
    math.inf,
    -math.inf,
    math.nan,
]


def back(tier: LossyTier | ExactTier, tensor: Tensor) -> Tensor:
    stored = tier.put(tensor)
    found = stored.get()
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    assert torch.equal(bits(stored.get()), bits(found))
    stored.drop()
    return found


def half_bound(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bound that the docstring of `Half` states, block by block."""
    relative, least, largest_share = {
        torch.float16: (2.0**-11, 2.0**-25, 2.0**-39),
        torch.bfloat16: (2.0**-8, 2.0**-134, 2.0**-260),
    }[dtype]
    rows = half.in_blocks(x.double(), half.BLOCK)
    finite = rows.where(rows.isfinite(), 0).abs()
    largest = finite.amax(1, keepdim=True)
    if x.dtype is torch.float64:
        relative *= 1 + 1 / 4000
    outside = largest > LIMIT[dtype]
    floor = torch.where(outside, largest * largest_share, least)
    return torch.maximum(finite * relative, floor).view(-1)[: x.numel()]


def eight_bit_bound(x: Tensor) -> Tensor:
    rows = half.in_blocks(x.double(), eight_bit.BLOCK)
    largest = rows.where(rows.isfinite(), 0).abs().amax(1, keepdim=True)
    return (largest / 250 + 2.0**-126).expand_as(rows).reshape(-1)[: x.numel()]


def assert_within(x: Tensor, found: Tensor, bound: Tensor) -> None:
    finite = x.isfinite()
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found.isinf(), x.isinf())
    assert torch.equal(found[x.isinf()], x[x.isinf()])
    error = (found.double() - x.double()).abs()
    assert bool((error <= bound)[finite].all())


numbers = st.lists(
    st.sampled_from(EDGES) | st.floats(width=32), min_size=1, max_size=40
)


class TestHalf:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("wide", [torch.float32, torch.float64])
    @settings(max_examples=30)
    @given(given_numbers=numbers, repeat=st.sampled_from([1, 30, 100]))
    def test_the_error_is_within_the_bound(self, dtype, wide, given_numbers, repeat):
        x = torch.tensor(given_numbers, dtype=wide).repeat(repeat)
        assert_within(x, back(Half(dtype=dtype), x), half_bound(x, dtype))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_each_edge_alone_is_within_the_bound(self, dtype):
        for edge in EDGES:
            x = torch.tensor([edge])
            assert_within(x, back(Half(dtype=dtype), x), half_bound(x, dtype))

    def test_numbers_of_64_bits_beyond_32_stay_finite(self):
        x = torch.tensor([1e300, -1e308, 1.0], dtype=torch.float64)
        for dtype in (torch.float16, torch.bfloat16):
            found = back(Half(dtype=dtype), x)
            assert_within(x, found, half_bound(x, dtype))

    def test_a_cast_without_our_exponents_would_fail(self):
        x = torch.tensor([7e4])
        found = x.half().float()
        with pytest.raises(AssertionError):
            assert_within(x, found, half_bound(x, torch.float16))

    def test_it_takes_half_the_bytes_and_a_thousandth(self):
        x = torch.randn(10 * half.BLOCK)
        parts = half.encode(x, torch.float16)
        assert [part.nbytes for part in parts] == [x.nbytes // 2, 2 * 10]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
    def test_other_types_are_refused(self, dtype):
        with pytest.raises(UsageError, match=r"torch\.bfloat16 or torch\.float16"):
            Half(dtype=dtype)


class TestEightBit:
    @pytest.mark.parametrize(
        "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    )
    @settings(max_examples=30)
    @given(given_numbers=numbers, repeat=st.sampled_from([1, 10, 30]))
    def test_the_error_is_within_the_bound(self, dtype, given_numbers, repeat):
        x = torch.tensor(given_numbers).to(dtype).repeat(repeat)
        bound = eight_bit_bound(x)
        if dtype in (torch.float16, torch.bfloat16):
            # Rounded once more, to its own type.
            unit = torch.finfo(dtype)
            bound = bound + x.double().nan_to_num(0, 0, 0).abs() * unit.eps
            bound = bound + unit.tiny * unit.eps
        found = back(EightBit(), x)
        if dtype is torch.float16:
            assert not bool((found.isinf() & ~x.isinf()).any())
        assert_within(x, found, bound)

    @pytest.mark.parametrize(
        "on", [Half(), Half(dtype=torch.float16), EightBit(), Packed(), HOST]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
    def test_the_error_is_the_same_wherever_it_is_kept(self, on, dtype):
        x = torch.randn(3 * eight_bit.BLOCK, dtype=dtype)
        found = back(EightBit(on), x)
        assert torch.equal(found, back(EightBit(), x))
        if not dtype.is_complex:
            assert_within(x, found, eight_bit_bound(x))

    def test_it_takes_a_byte_a_number_and_a_scale_a_block(self):
        parts = eight_bit.encode(torch.randn(10 * eight_bit.BLOCK))
        assert [part.nbytes for part in parts] == [10 * eight_bit.BLOCK, 4 * 10]

    def test_a_block_does_not_suffer_from_its_neighbour(self):
        x = torch.cat([torch.full((256,), 1e30), torch.linspace(-1, 1, 256)])
        found = back(EightBit(), x)
        assert float((found - x)[256:].abs().max()) <= 1 / 250


class TestPacked:
    @settings(max_examples=30)
    @given(st.lists(st.booleans(), max_size=70))
    def test_booleans_are_bits(self, values):
        x = torch.tensor(values, dtype=torch.bool)
        assert torch.equal(back(Packed(), x), x)

    def test_eight_booleans_take_a_byte(self):
        assert packed._to_bits(torch.ones(17, dtype=torch.bool)).nbytes == 3

    @pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
    @settings(max_examples=30)
    @given(data=st.data())
    def test_integers_come_back(self, dtype, data):
        info = torch.iinfo(dtype)
        inside = st.integers(info.min, info.max)
        start = data.draw(inside)
        near = st.integers(max(info.min, start - 200), min(info.max, start + 200))
        values = data.draw(st.lists(near | inside, min_size=1, max_size=20))
        x = torch.tensor(values, dtype=dtype)
        assert torch.equal(back(Packed(), x), x)

    def test_indices_of_a_pooling_layer_take_an_eighth(self):
        image = torch.randn(1, 1, 16, 16)
        _, indices = torch.nn.functional.max_pool2d(image, 2, return_indices=True)
        assert indices.dtype is torch.int64
        assert packed.narrowest(int(indices.min()), int(indices.max())) is torch.int8
        flat = indices.view(-1).clone()
        assert torch.equal(back(Packed(), flat), flat)

    @pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("wide", [torch.float32, torch.float64])
    @settings(max_examples=30)
    @given(given_numbers=numbers)
    def test_what_was_cast_up_comes_back_bit_by_bit(self, narrow, wide, given_numbers):
        x = torch.tensor(given_numbers).to(narrow).to(wide)
        assert torch.equal(bits(back(Packed(), x)), bits(x))

    @settings(max_examples=30)
    @given(given_numbers=numbers)
    def test_what_was_not_comes_back_bit_by_bit_too(self, given_numbers):
        x = torch.tensor(given_numbers)
        assert torch.equal(bits(back(Packed(), x)), bits(x))

    def test_an_up_cast_takes_the_bytes_of_its_source(self):
        x = torch.randn(300).bfloat16().float()
        found = packed._cast_down(x, torch.bfloat16)
        assert found is not None
        assert found.nbytes == x.nbytes // 2
        assert packed._cast_down(torch.randn(300), torch.bfloat16) is None

    def test_it_is_not_kept_on_a_lossy_tier(self):
        with pytest.raises(UsageError, match="swap them"):
            Packed(Half())


UNTOUCHED = [
    torch.tensor([1, -5, 1 << 40]),
    torch.tensor([True, False, True]),
    torch.arange(5, dtype=torch.uint8),
    torch.arange(-4, 4, dtype=torch.int8),
    torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
]
ALL = [
    codec(place)
    for codec, place in itertools.product(
        (Half, EightBit, Packed), (Device(), HOST, Packed(HOST))
    )
]


@pytest.mark.parametrize("tier", ALL, ids=str)
@pytest.mark.parametrize("tensor", UNTOUCHED, ids=lambda t: str(t.dtype))
def test_integers_booleans_and_bytes_come_back_bit_by_bit(tier, tensor):
    found = back(tier, tensor)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_leaves_numbers_of_16_bits_alone(dtype):
    x = torch.randn(100).to(dtype)
    assert torch.equal(back(Half(), x), x)


@pytest.mark.parametrize("tier", [Half(), EightBit()], ids=str)
def test_complex_numbers_are_pairs(tier):
    x = torch.randn(700, dtype=torch.complex64)
    found = back(tier, x)
    bound = (
        half_bound(torch.view_as_real(x).flatten(), torch.bfloat16)
        if isinstance(tier, Half)
        else eight_bit_bound(torch.view_as_real(x).flatten())
    )
    error = torch.view_as_real(found - x).flatten().double().abs()
    assert bool((error <= bound).all())


def test_exact_and_lossy_tiers_are_distinct_types():
    for tier in ALL:
        assert isinstance(tier, ExactTier) != isinstance(tier, LossyTier)
        assert tier.is_exact == isinstance(tier, ExactTier)


@pytest.mark.parametrize("tier", [Half, EightBit, Packed])
def test_a_place_that_is_no_tier_is_refused(tier):
    with pytest.raises(UsageError, match="expected another tier"):
        tier("host")


@pytest.mark.parametrize(
    ("tier", "tolerance"),
    [
        # A product of five cosines, each off by at most the rounding of its argument.
        (Half(smallest_bytes=0, dtype=torch.float16), 5 * 2.0**-11),
        (Half(HOST, smallest_bytes=0), 5 * 2.0**-8),
        (EightBit(HOST, smallest_bytes=0), 5 / 250),
    ],
    ids=str,
)
def test_gradients_through_a_lossy_tier_are_near_the_twins(tier, tolerance):
    x = torch.linspace(-1, 1, 1000, requires_grad=True)

    def run() -> Tensor:
        (gradient,) = torch.autograd.grad(x.sin().sin().sin().sin().sin().sum(), x)
        return gradient

    expected = run()
    with CheckpointScope("chain", store=tier, verify="always"):
        y = x.sin().sin().sin().sin().sin()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert 0 < float((found - expected).abs().max()) <= tolerance


@pytest.mark.parametrize("verify", ["first", "always", "full"])
def test_what_is_recomputed_from_a_lossy_value_is_not_taken_for_a_mismatch(verify):
    class KeepFirst:
        asked = 0

        def keeps(self, operator: str, nbytes: int) -> LossyTier | None:
            self.asked += 1
            return EightBit(smallest_bytes=0) if self.asked == 1 else None

    x = torch.linspace(-1, 1, 1000, requires_grad=True)
    with CheckpointScope("chain", policy=KeepFirst(), verify=verify):
        y = x.sin().sin().sin().sin()
    y.sum().backward()
