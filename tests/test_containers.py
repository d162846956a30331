"""Every kind of batch arrives with its types, values and references, and the loader's own is left alone."""

from __future__ import annotations

import array
import copy
import dataclasses
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.testing._internal.two_tensor import TwoTensor

from prefetch import CUDAPrefetcher, PrefetchError

SIM = "sim:0"


def tensor(*values: float) -> torch.Tensor:
    """A pinned tensor."""
    return torch.tensor(values).pin_memory()


_options: dict[str, Any] = {}


@pytest.fixture(autouse=True, params=["record_stream", "consumer", "static"])
def memory(request: pytest.FixtureRequest) -> str:
    """Who owns the memory of what is moved: all of this is the same for all."""
    _options["memory"] = request.param
    return str(request.param)


def moved(batch: Any, **options: Any) -> Any:
    """What the batch becomes on the simulated device."""
    (result,) = CUDAPrefetcher([batch], SIM, **_options, **options)
    return result


def is_moved(leaf: torch.Tensor, *values: float) -> bool:
    """Whether a leaf is on the device with these values."""
    return str(leaf.device) == SIM and leaf.tolist() == list(values)


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


class LabelledPoint(Point):
    """A named tuple with attributes of its own."""

    label: str


class Pair(tuple[Any, ...]):
    """A tuple whose __init__ wants more than its items."""

    note: str

    def __init__(self, items: Any, note: str = "") -> None:
        self.note = note


class Triple(tuple[Any, ...]):
    """A tuple that is made from single arguments."""

    def __new__(cls, *items: Any) -> Triple:
        """Any number of them."""
        return super().__new__(cls, items)


class Attributes(dict[str, Any]):
    """The dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Tagged(dict[str, Any]):
    """A dict with an attribute."""

    tag: str


class Frozen(dict[str, Any]):
    """A dict that refuses to be written to."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")


class InnerDict(MutableMapping[str, Any]):
    """A mapping that keeps its items in a dict of its own, which copy.copy would share."""

    def __init__(self, items: dict[str, Any], tag: str) -> None:
        self._items = items
        self.tag = tag

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class SlottedMapping(InnerDict):
    """The same with slots."""

    __slots__ = ("_items", "tag")


class ReadOnly(Mapping[str, Any]):
    """A mapping that cannot be made from its content."""

    def __init__(self, x: Any, /, *, key: str, tag: str = "default") -> None:
        self._key, self._x, self.tag = key, x, tag

    def __getitem__(self, key: str) -> Any:
        return {self._key: self._x}[key]

    def __iter__(self) -> Iterator[str]:
        return iter([self._key])

    def __len__(self) -> int:
        return 1


class Elsewhere(Mapping[str, Any]):
    """Keeps its items where nobody finds them."""

    __slots__ = ("__weakref__",)
    items_of: ClassVar[WeakKeyDictionary[Elsewhere, dict[str, Any]]] = WeakKeyDictionary()
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, **items: Any) -> None:
        self.items_of[self] = items

    def __getitem__(self, key: str) -> Any:
        return self.items_of[self][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of[self])

    def __len__(self) -> int:
        return len(self.items_of[self])


@dataclasses.dataclass(frozen=True)
class FieldMapping(Mapping[str, Any]):
    """A data class that is a mapping of its fields, as outputs of models are."""

    x: Any
    y: Any = None

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(("x", "y"))

    def __len__(self) -> int:
        return 2


class OrderedInner(InnerDict):
    """Keeps its items in a dict of another class."""

    def __init__(self, items: dict[str, Any], tag: str) -> None:
        super().__init__(OrderedDict(items), tag)


class Filtered(dict[str, Any]):
    """Hides an item from who asks in the usual way."""

    def items(self) -> Any:
        return [(key, value) for key, value in super().items() if key != "hidden"]


class Homing(dict[str, Any]):
    """Brings home what is put into it one by one."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value.cpu() if isinstance(value, torch.Tensor) else value)


class Backwards(list[Any]):
    """Is iterated over from the end."""

    def __iter__(self) -> Iterator[Any]:
        return reversed(self)


class Window(Sequence[Any]):
    """A read-only sequence."""

    def __init__(self, items: Any) -> None:
        self._items = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class NamedList(list[Any]):
    """A list with an attribute."""

    name: str


@dataclasses.dataclass
class Sample:
    """A data class with all that makes copying one hard."""

    image: Any
    label: Any = None
    cache: Any = dataclasses.field(init=False, default=None)
    never_set: Any = dataclasses.field(init=False, repr=False, compare=False)
    runs: list[int] = dataclasses.field(default_factory=list)
    seed: dataclasses.InitVar[int] = 0
    made: ClassVar[int] = 0

    def __post_init__(self, seed: int) -> None:
        Sample.made += 1
        self.runs.append(seed)


@dataclasses.dataclass(frozen=True)
class FrozenSample:
    """A frozen data class."""

    image: Any
    label: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedSample:
    """A frozen data class with slots."""

    image: Any
    label: Any = None


@dataclasses.dataclass(frozen=True)
class SelfCopying(FrozenSample):
    """Immutable, and so gives itself as its copy."""

    def __copy__(self) -> SelfCopying:
        return self


class Tagged2(TwoTensor):
    """Flattens into two tensors and a text."""

    text = "no tensor"

    def __tensor_flatten__(self) -> Any:
        names, context = super().__tensor_flatten__()
        return [*names, "text"], context


class TestTensors:
    """Single tensors of every shape and type."""

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.bool,
            torch.uint8,
            torch.uint16,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ],
        ids=str,
    )
    def test_type(self, sim: Any, dtype: torch.dtype) -> None:
        """The type and every bit of the value arrive."""
        source = torch.tensor([0, 1, 0, 1], dtype=torch.uint8).to(dtype).pin_memory()
        result = moved(source)
        assert (str(result.device), result.dtype) == (SIM, dtype)
        assert result.view(torch.uint8).tolist() == source.view(torch.uint8).tolist()

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4, 5)], ids=str)
    def test_shape(self, sim: Any, shape: tuple[int, ...]) -> None:
        """0-dimensional and empty tensors too."""
        source = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).pin_memory()
        result = moved(source)
        assert str(result.device) == SIM
        assert torch.equal(result.cpu(), source)
        assert result.shape == source.shape

    @pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning")
    def test_strides(self, sim: Any) -> None:
        """Expanded, transposed, sliced and channels_last tensors keep their values, dense ones their strides."""
        dense = torch.arange(24.0).reshape(1, 2, 3, 4).pin_memory()
        for source in (dense.transpose(1, 3), dense.contiguous(memory_format=torch.channels_last).pin_memory()):
            result = moved(source)
            assert torch.equal(result.cpu(), source)
            assert result.stride() == source.stride()
        for source in (dense[..., 1:], dense[..., ::2], dense.expand(5, 2, 3, 4), dense.flatten()[:1].expand(7)):
            assert torch.equal(moved(source).cpu(), source)

    def test_subclass(self, sim: Any) -> None:
        """A tensor subclass stays one."""
        from torchvision import tv_tensors

        image = tv_tensors.Image(torch.ones(3, 2, 2, dtype=torch.uint8).pin_memory())
        result = moved(image)
        assert type(result) is tv_tensors.Image
        assert (str(result.device), int(result.sum())) == (SIM, 12)

    def test_requires_grad(self, sim: Any) -> None:
        """A leaf that requires gradients arrives as one, and the others do not start to."""
        wants, plain = moved((torch.ones(2).pin_memory().requires_grad_(), tensor(1.0)), dtype=torch.float64)
        assert (wants.requires_grad, wants.is_leaf, plain.requires_grad) == (True, True, False)
        (wants * 3).sum().backward()
        assert wants.grad.tolist() == [3.0, 3.0]

    def test_jagged(self, sim: Any) -> None:
        """A nested tensor of the jagged layout moves with all its parts."""
        source = torch.nested.nested_tensor([torch.ones(2), torch.ones(4)], layout=torch.jagged).pin_memory()
        result = moved(source)
        assert (str(result.device), result.layout) == (SIM, torch.jagged)
        assert [part.tolist() for part in result.unbind()] == [[1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
        assert (str(result.values().device), str(result.offsets().device)) == (SIM, SIM)

    @pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning", "ignore:The PyTorch API of nested tensors")
    def test_strided_nested(self, sim: Any) -> None:
        """A nested tensor of the strided layout, pinned or not."""
        parts = [torch.ones(2, 3), torch.ones(1, 3)]
        for source in (torch.nested.nested_tensor(parts), torch.nested.nested_tensor(parts).pin_memory()):
            result = moved(source, memory_format=torch.channels_last)
            assert str(result.device) == SIM
            assert [part.shape for part in result.cpu().unbind()] == [(2, 3), (1, 3)]

    @pytest.mark.filterwarnings("ignore::prefetch.PrefetchWarning", "ignore:Sparse:UserWarning")
    def test_sparse(self, sim: Any) -> None:
        """Sparse tensors of the coordinate and the compressed layouts."""
        dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
        for source in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
            result = moved(source)
            assert (str(result.device), result.layout) == (SIM, source.layout)
            assert torch.equal(result.cpu().to_dense(), dense)

    def test_wrapper(self, sim: Any) -> None:
        """A wrapper subclass that flattens into more than tensors, as DTensor does, moves with all its tensors."""
        source = Tagged2(tensor(1, 2), tensor(3, 4))
        result = moved(source)
        assert type(result) is Tagged2
        assert is_moved(result.a, 1, 2)
        assert is_moved(result.b, 3, 4)

    def test_already_there(self, sim: Any, memory: str) -> None:
        """A tensor that is there already is passed on, unless for slots; one that only the cast touches is ordered."""
        there = torch.ones(4, device=SIM) * 2
        assert (moved([there])[0] is there) == (memory != "static")
        assert moved(there, dtype=torch.float64).tolist() == [2.0, 2.0, 2.0, 2.0]


class TestMappings:
    """Mappings keep type, order, attributes."""

    def test_dict(self, sim: Any) -> None:
        """Keys of any type, values nested."""
        source = {"a": tensor(1), 2: [tensor(2)], None: {"x": "text"}}
        result = moved(source)
        assert list(result) == ["a", 2, None]
        assert is_moved(result["a"], 1)
        assert is_moved(result[2][0], 2)
        assert result[None] is source[None]

    @pytest.mark.parametrize(
        "make",
        [
            OrderedDict,
            UserDict,
            lambda items: defaultdict(list, items),
            Counter,
            Tagged,
            lambda items: Attributes(**items),
            types.MappingProxyType,
            Frozen,
            lambda items: ChainMap(items, {"z": 0}),
            lambda items: InnerDict(items, "tag"),
            lambda items: SlottedMapping(items, "tag"),
            lambda items: OrderedInner(items, "tag"),
        ],
        ids=lambda make: make.__name__ if isinstance(make, type) else None,
    )
    def test_types(self, sim: Any, make: Any) -> None:
        """Any mapping keeps its type and keys, and the loader's own is not written to."""
        leaf = tensor(1, 2)
        source = make({"b": leaf, "a": 5})
        result = moved(source)
        assert type(result) is type(source)
        assert list(result) == list(source)
        assert is_moved(result["b"], 1, 2)
        assert result["a"] == 5
        assert source["b"] is leaf

    def test_extra_attributes(self, sim: Any) -> None:
        """What a mapping carries beside its items comes along."""
        tagged = Tagged(x=tensor(1))
        tagged.tag = "train"
        assert moved(tagged).tag == "train"
        assert moved(InnerDict({"x": tensor(1)}, "train")).tag == "train"
        assert moved(SlottedMapping({"x": tensor(1)}, "train")).tag == "train"
        assert moved(defaultdict(list, x=tensor(1)))["new"] == []

    def test_items_as_attributes(self, sim: Any) -> None:
        """In a dict whose items are its attributes both show the moved tensor."""
        result = moved(Attributes(x=tensor(3)))
        assert is_moved(result["x"], 3)
        assert result.x is result["x"]

    def test_read_only(self, sim: Any) -> None:
        """A mapping that can be neither filled nor made from its content is made from what it stores."""
        source = ReadOnly(tensor(1), key="x", tag="train")
        result = moved(source)
        assert (type(result), result.tag) == (ReadOnly, "train")
        assert is_moved(result["x"], 1)
        fields = moved(FieldMapping(tensor(1), 5))
        assert is_moved(fields.x, 1)
        assert fields["y"] == 5

    def test_all_layers_of_a_chain(self, sim: Any) -> None:
        """Every dict of a ChainMap is moved."""
        result = moved(ChainMap({"x": tensor(1)}, {"x": tensor(2), "y": tensor(3)}))
        assert is_moved(result.maps[1]["x"], 2)
        assert is_moved(result["y"], 3)

    def test_hidden_items(self, sim: Any) -> None:
        """A dict is moved with the items that it has, whatever it says of them."""
        result = moved(Filtered(x=tensor(1), hidden=tensor(2)))
        assert is_moved(result["x"], 1)
        assert is_moved(result["hidden"], 2)

    def test_items_that_change_on_their_way(self, sim: Any) -> None:
        """A dict that changes what is put into it is made in another way."""
        assert is_moved(moved(Homing(x=tensor(1)))["x"], 1)

    def test_that_cannot_be_made(self, sim: Any) -> None:
        """A mapping that would be another one afterwards is an error that says what to do."""
        with pytest.raises(PrefetchError, match=r"Elsewhere .* cannot be made: give the class a constructor"):
            moved(Elsewhere(x=tensor(1)))

    def test_without_tensors_is_passed_on(self, sim: Any) -> None:
        """What holds nothing to move is the same object."""
        source = ReadOnly("text", key="x")
        assert moved([source])[0] is source


class TestSequences:
    """Tuples, lists and other sequences keep their type."""

    @pytest.mark.parametrize("make", [tuple, list, deque, UserList, Pair, Window, NamedList], ids=lambda m: m.__name__)
    def test_types(self, sim: Any, make: Any) -> None:
        """Any sequence keeps its type, and the loader's own is not written to."""
        leaf = tensor(1)
        source = make([leaf, "text", None])
        result = moved(source)
        assert type(result) is type(source)
        assert is_moved(result[0], 1)
        assert [result[1], result[2]] == ["text", None]
        assert source[0] is leaf

    def test_named_tuple(self, sim: Any) -> None:
        """Named tuples keep class and attributes."""
        point = LabelledPoint(tensor(1), Point(tensor(2), 3))
        point.label = "corner"
        result = moved(point)
        assert (type(result), type(result.y), result.label, result.y.y) == (LabelledPoint, Point, "corner", 3)
        assert is_moved(result.x, 1)
        assert is_moved(result.y.x, 2)

    def test_extra_attributes(self, sim: Any) -> None:
        """What a sequence carries beside its items comes along."""
        named = NamedList([tensor(1)])
        named.name = "images"
        assert moved(named).name == "images"
        assert moved(Pair([tensor(1)], note="hello")).note == "hello"
        assert moved(deque([tensor(1)], maxlen=4)).maxlen == 4

    def test_torch_return_type(self, sim: Any) -> None:
        """A result of a torch function is a tuple of its own kind."""
        source: Any = torch.tensor([1.0, 3.0]).max(dim=0)
        source = type(source)([part.pin_memory() for part in source])
        result = moved(source)
        assert type(result) is type(source)
        assert is_moved(result.values.reshape(1), 3)
        assert is_moved(result.indices.reshape(1), 1)

    def test_own_constructor(self, sim: Any) -> None:
        """A tuple that is made in its own way, and a list that iterates in its own way, keep their items."""
        result = moved(Triple(tensor(1), 2, 3))
        assert (type(result), len(result), result[1:]) == (Triple, 3, (2, 3))
        assert is_moved(result[0], 1)
        backwards = moved(Backwards([tensor(1), "last"]))
        assert is_moved(backwards[0], 1)
        assert backwards[1] == "last"

    @pytest.mark.parametrize(
        "atom",
        [
            "text",
            b"bytes",
            bytearray(b"x"),
            None,
            3,
            2.5,
            1 + 2j,
            True,
            range(3),
            UserString("u"),
            array.array("d", [1]),
            np.arange(3),
            {1, 2},
            frozenset([1]),
            object(),
            int,
            torch.float32,
            torch.device("cpu"),
            torch.Size([2]),
        ],
        ids=lambda atom: type(atom).__name__,
    )
    def test_everything_else_is_untouched(self, sim: Any, atom: Any) -> None:
        """What is no tensor and no container is the same object, alone and inside of containers."""
        assert moved(atom) is atom
        assert moved([tensor(1), {"x": atom}])[1]["x"] is atom


class TestDataclasses:
    """Data classes of all kinds."""

    def test_plain(self, sim: Any) -> None:
        """Fields without an argument and unset ones are kept, __post_init__ does not run again, extras come along."""
        leaf = tensor(1)
        source = Sample(leaf, {"y": tensor(2)}, seed=7)
        source.cache = [tensor(3)]
        source.extra = "kept"  # type: ignore[attr-defined]
        made = Sample.made
        result = moved(source)
        assert Sample.made == made
        assert (type(result), result.runs, result.extra) == (Sample, [7], "kept")
        assert is_moved(result.image, 1)
        assert is_moved(result.label["y"], 2)
        assert is_moved(result.cache[0], 3)
        assert not hasattr(result, "never_set")
        assert source.image is leaf

    @pytest.mark.parametrize("kind", [FrozenSample, SlottedSample, SelfCopying])
    def test_frozen(self, sim: Any, kind: Any) -> None:
        """Frozen ones, with slots, and those that are their own copy."""
        leaf = tensor(1)
        source = kind(leaf, "cat")
        result = moved(source)
        assert (type(result), result.label) == (kind, "cat")
        assert is_moved(result.image, 1)
        assert source.image is leaf

    def test_class_is_no_instance(self, sim: Any) -> None:
        """The class itself in a batch is passed on."""
        assert moved([tensor(1), Sample])[1] is Sample


class TestPackedSequence:
    """torch's packed sequences."""

    def test_batch_sizes_stay_on_the_host(self, sim: Any) -> None:
        """Data and orders move, batch_sizes cannot; unpacking gives the same values."""
        source = pack_sequence([torch.ones(2), torch.ones(3) * 2], enforce_sorted=False).pin_memory()
        result: Any = moved(source)
        assert isinstance(result, PackedSequence)
        assert result.sorted_indices is not None
        assert result.unsorted_indices is not None
        assert str(result.data.device) == SIM
        assert (str(result.batch_sizes.device), result.batch_sizes.tolist()) == ("cpu", [2, 2, 1])
        assert (str(result.sorted_indices.device), str(result.unsorted_indices.device)) == (SIM, SIM)
        padded, lengths = pad_packed_sequence(result)
        assert padded.t().tolist() == [[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]]
        assert lengths.tolist() == [2, 3]

    def test_sorted(self, sim: Any) -> None:
        """Without orders there are none afterwards; the cast reaches the data."""
        result: Any = moved(pack_sequence([torch.ones(3), torch.ones(1)]).pin_memory(), dtype=torch.float64)
        assert (result.data.dtype, result.sorted_indices, str(result.batch_sizes.device)) == (
            torch.float64,
            None,
            "cpu",
        )


class Inplace:
    """Moves itself in place, and keeps its tensors in an inner dict and list."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self._inner = {"x": [leaf]}
        self.calls = 0

    @property
    def costly(self) -> Any:
        """Must never be asked for."""
        raise AssertionError("property evaluated")

    def to(self, device: torch.device) -> Inplace:
        """Writes to itself."""
        self.calls += 1
        self._inner["x"][0] = self._inner["x"][0].to(device)
        return self


class Nested:
    """Moves the object inside of it in place, and knows it by two names."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self.parts = [Inplace(leaf)]
        self.by_name = OrderedDict(first=self.parts[0])

    def to(self, device: torch.device) -> Nested:
        """Writes to what it holds."""
        self.parts[0].to(device)
        return self


class DictWithTo(dict[str, Any]):
    """A dict that moves itself in place."""

    def to(self, device: torch.device, non_blocking: bool = False) -> DictWithTo:
        """Writes to itself."""
        for key in self:
            self[key] = self[key].to(device, non_blocking=non_blocking)
        return self


class Immutable(Inplace):
    """Calls itself immutable; makes another one."""

    def __copy__(self) -> Immutable:
        return self

    def to(self, device: torch.device) -> Immutable:
        """Makes another one."""
        return Immutable(self._inner["x"][0].to(device))


class Uncopyable(Inplace):
    """Cannot be copied."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("no copies")


class InplaceSilent(Inplace):
    """The same without a result."""

    def to(self, device: torch.device) -> None:  # type: ignore[override]
        """Returns nothing."""
        super().to(device)


class Returning:
    """Makes another object, with slots, and knows ``non_blocking``."""

    __slots__ = ("leaf", "non_blocking")

    def __init__(self, leaf: torch.Tensor, non_blocking: bool | None = None) -> None:
        self.leaf = leaf
        self.non_blocking = non_blocking

    def to(self, device: torch.device, non_blocking: bool = False) -> Returning:
        """Says how it was called."""
        return Returning(self.leaf.to(device, non_blocking=non_blocking), non_blocking)


class Broken(Returning):
    """Fails to move."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Returning:
        """Raises its own error."""
        raise ArithmeticError("own error")


class TestOwnTo:
    """Objects with a method ``.to``."""

    @pytest.mark.parametrize("kind", [Inplace, InplaceSilent])
    def test_in_place(self, sim: Any, kind: Any) -> None:
        """One that moves itself in place is copied first."""
        leaf = tensor(1)
        source = kind(leaf)
        result = moved([source])[0]
        assert (type(result), result.calls) == (kind, 1)
        assert is_moved(result._inner["x"][0], 1)
        assert source._inner["x"][0] is leaf
        assert source.calls == 0

    def test_in_place_deep_inside(self, sim: Any) -> None:
        """What an object moves inside of itself is copied first too, and stays one object under two names."""
        leaf = tensor(1)
        source = Nested(leaf)
        result = moved(source)
        assert is_moved(result.parts[0]._inner["x"][0], 1)
        assert result.by_name["first"] is result.parts[0]
        assert source.parts[0]._inner["x"][0] is leaf

    def test_dict_in_place(self, sim: Any) -> None:
        """A dict with a method .to is copied first."""
        leaf = tensor(1)
        source = DictWithTo(x=leaf)
        result = moved(source)
        assert is_moved(result["x"], 1)
        assert source["x"] is leaf

    def test_immutable(self, sim: Any) -> None:
        """An object that is its own copy is trusted to make another one."""
        assert is_moved(moved(Immutable(tensor(1)))._inner["x"][0], 1)

    def test_that_cannot_be_copied(self, sim: Any) -> None:
        """One that cannot be copied is named, with the remedy."""
        with pytest.raises(PrefetchError, match=r"Uncopyable in the batch cannot be copied: give it a method __copy__"):
            moved(Uncopyable(tensor(1)))

    def test_modules_are_not_moved(self, sim: Any) -> None:
        """A module moves in place and is no data: it is passed on."""
        module = torch.nn.Linear(2, 2)
        assert moved([tensor(1), module])[1] is module
        assert str(module.weight.device) == "cpu"

    def test_non_blocking(self, sim: Any) -> None:
        """The keyword is given to those that know it."""
        result = moved(Returning(tensor(1)))
        assert result.non_blocking is True
        assert is_moved(result.leaf, 1)

    def test_error_surfaces(self, sim: Any) -> None:
        """An error of its own comes through as it is."""
        with pytest.raises(ArithmeticError, match="own error"):
            moved([tensor(1), Broken(tensor(2))])

    def test_the_same_object_twice(self, sim: Any) -> None:
        """Two references to one object stay that, and it is moved once."""
        source = Inplace(tensor(1))
        first, second = moved([source, source])
        assert first is second
        assert first.calls == 1

    def test_class_with_to_is_no_object(self, sim: Any) -> None:
        """The class itself in a batch is passed on."""
        assert moved([Inplace])[0] is Inplace


class Node:
    """Moves itself; its attributes are a tree whose branches know their root."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.branch = FrozenSample([tensor], self)
        self.history = list(range(3))

    def to(self, device: torch.device, non_blocking: bool = False) -> Node:
        """Makes another one."""
        return Node(self.branch.image[0].to(device, non_blocking=non_blocking))


class TestCycles:
    """Structures that refer to themselves."""

    def test_inside_of_an_object(self, sim: Any) -> None:
        """An object that moves itself may be as cyclic as it likes."""
        result = moved([Node(tensor(4))])[0]
        assert is_moved(result.branch.image[0], 4)
        assert result.branch.label is result

    def test_container_that_holds_itself(self, sim: Any) -> None:
        """A container in itself cannot be rebuilt; the error says what to do."""
        batch: list[Any] = [tensor(1)]
        batch.append(batch)
        with pytest.raises(
            PrefetchError, match=r"a container in the batch holds itself: give it a method .to\(device\)"
        ):
            moved(batch)

    def test_container_that_holds_itself_in_a_transform(self, sim: Any, memory: str) -> None:
        """A transform may return what it likes, if that need not be rebuilt with other memory."""

        def transform(batch: torch.Tensor) -> Any:
            result: list[Any] = [batch]
            result.append(result)
            return result

        if memory == "record_stream":
            assert is_moved(moved(tensor(1), transform=transform)[1][1][0], 1)
        else:
            with pytest.raises(PrefetchError, match="a container in the batch holds itself"):
                moved(tensor(1), transform=transform)


class TestReferences:
    """Aliases and the loader's own batch."""

    def test_two_references_stay_one_tensor(self, sim: Any) -> None:
        """One tensor at three places is copied once."""
        leaf = tensor(1, 2)
        result = moved({"a": leaf, "b": [leaf, (leaf,)]})
        assert result["a"] is result["b"][0]
        assert result["a"] is result["b"][1][0]
        torch.accelerator.synchronize()
        assert [span.name for span in sim.trace()].count("copy_h2d") == 1

    def test_input_is_not_mutated(self, sim: Any) -> None:
        """A deep batch is afterwards what it was, object by object."""
        leaf = tensor(1)
        source = {"list": [leaf], "map": OrderedDict(x=leaf), "user": UserDict(x=leaf), "deque": deque([leaf])}
        before = copy.copy(source)
        moved(source, dtype=torch.float64, transform=lambda batch: batch["list"][0].add_(1))
        assert source == before
        assert all(next(iter(container)) in (leaf, "x") for container in source.values())
        assert leaf.tolist() == [1.0]

    def test_skip_keys(self, sim: Any) -> None:
        """Keys of mappings and names of fields keep their subtrees on the host."""
        skipped = {"deep": tensor(1)}
        source: Any = {
            "meta": skipped,
            "x": {"meta": tensor(2), "y": tensor(3)},
            "point": Point(tensor(4), tensor(5)),
            "sample": FrozenSample(tensor(6), tensor(7)),
        }
        result = moved(source, skip_keys=("meta", "y", "label"))
        assert result["meta"] is skipped
        assert result["x"] is source["x"]
        assert is_moved(result["point"].x, 4)
        assert result["point"].y is source["point"].y
        assert is_moved(result["sample"].image, 6)
        assert result["sample"].label is source["sample"].label
