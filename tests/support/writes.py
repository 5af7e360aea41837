"""Intervals of code that write to tensors in every way there is."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from recoup import keep

Body = Callable[[Tensor, Tensor], Tensor]
"""Takes a tensor to differentiate by and a buffer from outside, both 4 by 4."""


def in_place_chain(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * 2
    y.add_(1).mul_(3).sin_()
    return y.exp()


def saved_before_the_write(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * 2
    z = y.detach().clone()
    saved = z * x  # saves z
    w = z.clone()
    w.add_(1)
    return saved.exp() + (w * x).sin()


def write_through_views(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * 2
    y[0].mul_(3)
    y.T[1:].add_(y.detach().T[1:].clone())
    y.diagonal().zero_()
    y.view(-1)[::3] = 5
    return y.exp().sin()


def as_strided_write(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * 2
    y.as_strided((2, 2), (8, 2), 1).mul_(3)
    return y.exp().sin()


def buffer_read_then_written(x: Tensor, buffer: Tensor) -> Tensor:
    before = (buffer * 2).exp()
    buffer.add_(1)
    return (x * before).sin()


def buffer_written_then_read(x: Tensor, buffer: Tensor) -> Tensor:
    buffer.mul_(2).add_(1)
    return (x * buffer.exp()).sin()


def buffer_between_reads(x: Tensor, buffer: Tensor) -> Tensor:
    first = buffer.exp()
    buffer.add_(1)
    second = buffer.exp()
    buffer[1:].mul_(2)
    third = buffer.exp()
    return (x * first + x.sin() * second).tanh() * third * x


def buffer_joins_the_graph(x: Tensor, buffer: Tensor) -> Tensor:
    buffer.mul_(x.exp())
    return (buffer * x).sin()


def buffer_takes_a_statistic(x: Tensor, buffer: Tensor) -> Tensor:
    with torch.no_grad():
        buffer.lerp_(x.exp(), 0.1)
    return (x / (buffer.abs() + 1)).sin().exp()


def empty_filled_by_slices(x: Tensor, buffer: Tensor) -> Tensor:
    y = torch.empty(8, 4)
    y[:4] = x.exp()
    y[4:].copy_(x.sin())
    return (y * y.detach().cos()).sin()


def empty_filled_in_part(x: Tensor, buffer: Tensor) -> Tensor:
    y = x.new_empty(8, 4)
    y[2:6] = x.exp()
    y[2:6] *= 2
    return y[2:6].sin() * y[2:6].detach().cos()


def empty_index(x: Tensor, buffer: Tensor) -> Tensor:
    index = torch.empty(4, dtype=torch.long)
    for place in range(4):
        index[place] = 3 - place
    return x[index].exp() * x[index.flip(0)].sin()


def zeros_filled_by_index(x: Tensor, buffer: Tensor) -> Tensor:
    y = x.new_zeros(4, 4)
    y[torch.tensor([2, 0])] = x[:2].exp()
    y.index_add_(0, torch.tensor([1, 1]), x[2:])
    y.scatter_(1, torch.tensor([[0], [1], [2], [3]]), 0.5)
    y.masked_fill_(y > 1, 1.0)
    return y.sin() * x


def out_argument(x: Tensor, buffer: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.empty(0)
        torch.mul(x, 2, out=y)
        torch.add(y, 1, out=buffer)
    return (x * y).sin() * (x * buffer).exp()


def foreach(x: Tensor, buffer: Tensor) -> Tensor:
    with torch.no_grad():
        inside = [x.exp(), x.sin()]
        torch.ops.aten._foreach_add_([*inside, buffer], 1.0)
        torch.ops.aten._foreach_mul_([buffer, inside[0]], 0.5)
    return (x * inside[0] + x.cos() * inside[1]).sin() * buffer * x


def write_by_data(x: Tensor, buffer: Tensor) -> Tensor:
    y = (x * 2).detach()
    y.data.add_(1)
    buffer.data.mul_(2)
    return (x * y.exp() * buffer.exp()).sin()


def transposed_in_place(x: Tensor, buffer: Tensor) -> Tensor:
    y = (x * 2).detach()
    first = y.exp()
    y.t_()
    second = y.exp()
    y.unsqueeze_(0).squeeze_(0)
    return (x * first + x.cos() * second * y).sin()


def outside_transposed_in_place(x: Tensor, buffer: Tensor) -> Tensor:
    first = buffer.exp()
    buffer.t_()
    return (x * first + x.cos() * buffer.exp()).sin()


def linear_of_a_vector(x: Tensor, buffer: Tensor) -> Tensor:
    return (functional.linear(x[0], x * 2) * 2).sin()


def data_exchanged(x: Tensor, buffer: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    first = y.exp()
    y.data = y.data.T
    second = y.exp()
    y.data = x.detach() * 3
    return (x * first + x.cos() * second + x.tanh() * y.exp()).sin()


def detached_in_place(x: Tensor, buffer: Tensor) -> Tensor:
    y = x.exp()
    y.detach_()
    y.mul_(2)
    return (x * y).sin()


def resized(x: Tensor, buffer: Tensor) -> Tensor:
    y = torch.zeros(2)
    y.resize_(4, 4)
    y.copy_(x.detach())
    return (y.exp() * x).sin()


def other_type(x: Tensor, buffer: Tensor) -> Tensor:
    y = x.detach().exp()
    bits = y.view(torch.int32)
    bits.bitwise_and_(-256)
    return (x * y).sin() * (x * y.view(torch.int32).float()).cos()


def parts_of_a_complex(x: Tensor, buffer: Tensor) -> Tensor:
    y = torch.complex(x, x.sin())
    z = y.conj() * y.resolve_conj()
    z.real.add_(1)
    torch.view_as_real(z)[..., 1].mul_(2)
    return (z.conj() * y).real.exp().sin() + z.imag


def kept_then_written(x: Tensor, buffer: Tensor) -> Tensor:
    y = keep(x * 2)
    z = keep(y + 1)
    z.mul_(2)
    return z.exp().sin()


def dropout_in_place(x: Tensor, buffer: Tensor) -> Tensor:
    return functional.relu_(functional.dropout(x.exp() + 1, inplace=True)).sin()


def written_by_random_numbers(x: Tensor, buffer: Tensor) -> Tensor:
    buffer.uniform_()
    y = x.exp() + 1
    y[1].data.normal_()
    return (y * buffer * x).sin()


def swapped(x: Tensor, buffer: Tensor) -> Tensor:
    with torch.no_grad():
        a, b = x.exp(), x.sin()
        keeping = a.clone()
        a.copy_(b)
        b.copy_(keeping)
    return (x * a).sin() + (x * b).cos()


def self_assigned(x: Tensor, buffer: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.exp()
        y[:2] = y[2:]
        y += y
        y.addmm_(y.clone(), y.clone())
    return (x * y).sin()


def counted(x: Tensor, buffer: Tensor) -> Tensor:
    counter = torch.zeros((), dtype=torch.long)
    for _ in range(3):
        counter += 1
        x = (x / counter.clone()).sin()
    return x


def statistics_inside(x: Tensor, buffer: Tensor) -> Tensor:
    mean, variance = torch.zeros(4), torch.ones(4)
    y = functional.batch_norm(x, mean, variance, training=True)
    return (y * mean).sin() + (y * variance).exp()


def statistics_cloned(x: Tensor, buffer: Tensor) -> Tensor:
    mean, variance = buffer[0].clone(), buffer[1].square().clone()
    y = functional.batch_norm(x, mean, variance, training=True, momentum=0.3)
    y = functional.batch_norm(y.exp(), mean, variance, training=True, momentum=0.3)
    return (y * mean).sin() + (y * variance).exp()


def statistics_of_the_buffer(x: Tensor, buffer: Tensor) -> Tensor:
    y = functional.batch_norm(x, buffer[0], buffer[1].square_(), training=True)
    y = functional.batch_norm(y.exp(), buffer[0], buffer[1], training=False)
    return (y * buffer[1]).sin() * buffer[0]


def noise_written_after_it_is_saved(x: Tensor, buffer: Tensor) -> Tensor:
    # The only operator of PyTorch that writes to what autograd has saved before it.
    noise = torch.zeros_like(x) + 2
    y = torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.3, training=True)
    return (y * noise).sin()


def data_written_after_it_is_saved(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * 2
    z = y.sin()
    y.data.add_(1)
    w = y.cos()
    y.data[1:].mul_(2)
    return z * w


def data_written_between_counted_writes(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * 2
    z = y.sin()
    y.data.add_(1)
    w = y.detach().clone()
    w.mul_(2)
    return z * w


BODIES = [
    noise_written_after_it_is_saved,
    data_written_after_it_is_saved,
    data_written_between_counted_writes,
    in_place_chain,
    saved_before_the_write,
    write_through_views,
    as_strided_write,
    buffer_read_then_written,
    buffer_written_then_read,
    buffer_between_reads,
    buffer_joins_the_graph,
    buffer_takes_a_statistic,
    empty_filled_by_slices,
    empty_filled_in_part,
    empty_index,
    zeros_filled_by_index,
    out_argument,
    foreach,
    write_by_data,
    transposed_in_place,
    outside_transposed_in_place,
    linear_of_a_vector,
    data_exchanged,
    detached_in_place,
    resized,
    other_type,
    parts_of_a_complex,
    kept_then_written,
    dropout_in_place,
    written_by_random_numbers,
    swapped,
    self_assigned,
    counted,
    statistics_inside,
    statistics_cloned,
    statistics_of_the_buffer,
]


# Plain autograd saves the buffer in these, so that nobody may write to it afterwards.
SAVING = {
    buffer_joins_the_graph,
    out_argument,
    foreach,
    written_by_random_numbers,
    statistics_of_the_buffer,
}
