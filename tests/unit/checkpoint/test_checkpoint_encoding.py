"""The encoding of saved state: loaded values are equal and have equal types, or the save raises a CheckpointError that
names the key."""

from __future__ import annotations

import datetime
import enum
import pathlib
import pickle
import weakref
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from checkpointed_runs import build_training, list_names, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from thorough import choose
from torch import nn

from topkube.errors import CheckpointError
from topkube.training.checkpoint.format.decoding import Undecodable, decode
from topkube.training.checkpoint.format.encoding import encode
from topkube.training.checkpoint.format.state_file import Damaged, FileDigest, read_state, write_state

ZONES = st.one_of(
    st.none(),
    st.just(datetime.UTC),
    st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(datetime.timezone),
    st.sampled_from(["Europe/Berlin", "Asia/Kathmandu"]).map(zoneinfo.ZoneInfo),
)
TEXT = st.text(st.characters(), max_size=8)
KEYS = st.one_of(TEXT, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.binary(max_size=4))
SCALARS = st.one_of(
    arrays.scalar_dtypes(),
    arrays.unicode_string_dtypes(max_len=5),
    arrays.byte_string_dtypes(max_len=5),
)
TENSORS = st.sampled_from(
    [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.empty(0, 3, dtype=torch.int64),
        torch.tensor(1 + 2j),
        torch.tensor([True]),
        torch.ones(3, 4).to_sparse(),
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ]
)
LEAVES = st.one_of(
    KEYS,
    st.floats(),
    st.integers(2**63 - 2, 2**70),
    st.complex_numbers(),
    st.binary(max_size=9).map(bytearray),
    st.datetimes(timezones=ZONES),
    st.times(),
    st.dates(),
    st.timedeltas(),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    st.sampled_from([Path("/a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:\\a")]),
    st.sampled_from([torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])]),
    arrays.arrays(SCALARS, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)),
    SCALARS.flatmap(lambda dtype: arrays.arrays(dtype, ())).map(lambda array: array[()]),
    TENSORS,
)


def build_containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, pairs = st.lists(inside, max_size=4), st.dictionaries(KEYS, inside, max_size=4)
    keys = st.lists(KEYS, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(lambda items: deque(items, 3)),
        keys.map(set),
        keys.map(frozenset),
        keys.map(Counter),
        pairs,
        st.dictionaries(st.tuples(KEYS, KEYS), inside, max_size=3),
        st.dictionaries(st.just("__topkube__"), inside),
        pairs.map(OrderedDict),
        pairs.map(lambda items: defaultdict(list, items)),
    )


STATES = st.dictionaries(TEXT, st.recursive(LEAVES, build_containers, max_leaves=12), max_size=4)


def assert_same(a: Any, b: Any) -> None:
    """Assert that two values and their types are equal, at any depth. NaN equals NaN."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.requires_grad, a.layout) == (b.dtype, b.requires_grad, b.layout)
        assert torch.equal(a.to_dense(), b.to_dense())
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert vars(a) == vars(b) if hasattr(a, "__dict__") else True
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        assert len(a) == len(b)
        for (key, value), (other, its_value) in zip(a.items(), b.items(), strict=True):
            assert_same(key, other)
            assert_same(value, its_value)
    elif isinstance(a, list | tuple | deque) and not isinstance(a, torch.Size):
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        for item, other in zip(a, b, strict=True):
            assert_same(item, other)
    elif isinstance(a, datetime.datetime | datetime.time):
        assert (a, a.fold, a.tzinfo) == (b, b.fold, b.tzinfo)
    elif isinstance(a, float | complex) and a != a:
        assert repr(a) == repr(b)
    else:
        assert a == b


@settings(
    max_examples=choose(100, thorough=300),
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.function_scoped_fixture],
)
@given(state=STATES)
def test_any_state_that_is_saved_is_loaded_with_equal_values_and_types(state: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.unlink(missing_ok=True)
    assert_same(read_state(path, write_state(path, encode(state))), state)


class Colour(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "a b")


class Text(str):
    pass


itself: list[Any] = []
itself.append(itself)
deep: list[Any] = []
for _ in range(120):
    deep = [deep]

REFUSED: dict[str, Any] = {
    "a function": print,
    "an enum": Colour.RED,
    "a named tuple": Pair(1, 2),
    "a subclass of str": Text("a"),
    "an object": object(),
    "an array of objects": np.array([None, 1]),
    "a structured array": np.zeros(2, [("a", "i4")]),
    "a masked array": np.ma.masked_array([1, 2], [0, 1]),
    "a lambda as a factory": defaultdict(lambda: 1),
    "a generator": torch.Generator(),
    "a tensor without memory": torch.ones(2, device="meta"),
    "itself": itself,
    "too deep": deep,
}


@pytest.mark.parametrize("name", REFUSED)
def test_save_refuses_a_value_that_load_would_refuse_and_names_its_key(name: str) -> None:
    state = {"more": {"tracker": {"started": [0, REFUSED[name]]}}}
    with pytest.raises(CheckpointError) as refused:
        encode(state)
    assert str(refused.value).startswith("more['tracker']['started'][1]")
    assert "cannot be saved" in str(refused.value)


def test_nothing_is_written_if_a_state_cannot_be_saved(tmp_path: Path) -> None:
    class Tracker:
        def state_dict(self) -> dict[str, Any]:
            return {"started": print}

    with pytest.raises(CheckpointError, match=r"^more\['tracker'\]\['started'\] cannot be saved: it is a builtins\."):
        train(tmp_path, 3, objects={"tracker": Tracker()})
    assert list_names(tmp_path) == []


def test_a_scheduler_with_a_numpy_learning_rate_and_a_tracker_come_back(tmp_path: Path) -> None:
    class Tracker:
        def __init__(self, state: dict[str, Any]) -> None:
            self.state = state

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    kept = {
        "started": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "best": np.float64(0.5),
        "counts": defaultdict(int, {"a": 1}),
        "where": Path("runs/1"),
    }

    def build_state() -> tuple[Any, Any, Tracker]:
        pair = build_training()
        scheduler = torch.optim.lr_scheduler.LambdaLR(pair[1], lambda epoch: np.cos(epoch / 100))
        return pair, scheduler, Tracker({})

    pair, scheduler, tracker = build_state()
    tracker.state = kept
    for _ in range(3):
        scheduler.step()
    train(tmp_path, 3, pair=pair, objects={"scheduler": scheduler, "tracker": tracker})
    assert isinstance(pair[1].param_groups[0]["lr"], np.floating), "the learning rate is a NumPy scalar"
    resumed, resumed_scheduler, resumed_tracker = build_state()
    assert (
        train(tmp_path, 3, pair=resumed, objects={"scheduler": resumed_scheduler, "tracker": resumed_tracker}).step == 3
    )
    assert_same(resumed_tracker.state, kept)
    assert resumed_scheduler.get_last_lr() == scheduler.get_last_lr()
    assert resumed[1].param_groups[0]["lr"] == pair[1].param_groups[0]["lr"]


def test_a_file_can_be_read_without_topkube(tmp_path: Path) -> None:
    pair = build_training()
    train(tmp_path, 2, pair=pair)
    loaded = torch.load(tmp_path / "step-00000002.run-00001" / "shared.pt", weights_only=True)
    assert loaded["step"] == 2
    model, _ = build_training()
    model.load_state_dict(loaded["model"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), pair[0].parameters(), strict=True))
    assert loaded["model"]._metadata == pair[0].state_dict()._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value",
    [
        {"__topkube__": "builtins.eval"},
        {"__topkube__": ["unhashable"]},
        {"__topkube__": "ndarray", "dtype": "O", "shape": (1,), "values": torch.zeros(8, dtype=torch.uint8)},
        {"__topkube__": "ndarray", "dtype": "<f8", "shape": (9,), "values": torch.zeros(8, dtype=torch.uint8)},
        {"__topkube__": "dtype", "name": "load"},
        {"__topkube__": "set"},
    ],
)
def test_a_hostile_encoding_is_refused(value: Any) -> None:
    with pytest.raises(Undecodable):
        decode({"more": [value]})


def test_a_foreign_file_with_a_valid_checksum_is_damage(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("code that a load must not run",)

    path = tmp_path / "shared.pt"
    for content in (b"nothing", pickle.dumps({"a": Evil()})):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        written = write_state(tmp_path / "other.pt", {})
        (tmp_path / "other.pt").unlink()
        digest = type(written)(len(content), xxhash.xxh3_64_intdigest(content))
        with pytest.raises(Damaged):
            read_state(path, digest)


def digest_file(path: Path) -> FileDigest:
    return FileDigest(path.stat().st_size, xxhash.xxh3_64_intdigest(path.read_bytes()))


def test_a_sparse_tensor_with_indices_outside_of_it_is_damage(tmp_path: Path) -> None:
    """Its use would write outside of the memory of other tensors."""
    path = tmp_path / "shared.pt"
    values = torch.sparse_coo_tensor(torch.tensor([[10**9]]), torch.ones(1), (4,), check_invariants=False)
    torch.save({"values": values}, path)
    with pytest.raises(Damaged, match="cannot be loaded"):
        read_state(path, digest_file(path))


def test_a_program_is_damage_and_torch_does_not_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of torch before 2.6 run TorchScript, also with `weights_only`."""
    path = tmp_path / "shared.pt"
    writer = torch._C.PyTorchFileWriter(str(path))
    writer.write_record("constants.pkl", b"", 0)
    writer.write_end_of_file()
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: pytest.fail("torch has loaded a program"))
    with pytest.raises(Damaged, match="holds a program"):
        read_state(path, digest_file(path))


def test_copies_are_in_host_memory_whatever_the_default_device_is(tmp_path: Path) -> None:
    """A script may call torch.set_default_device("cuda"). Here meta, which has no values, is that device."""
    from topkube.training.checkpoint.host_copies import HostCopies

    weight = torch.arange(300.0)
    with torch.device("meta"), HostCopies().take() as copy:
        state = encode({"weight": weight}, copy)
        written = write_state(tmp_path / "a.pt", state)
    assert torch.equal(read_state(tmp_path / "a.pt", written)["weight"], weight)


def test_tied_weights_stay_tied_and_are_written_once(tmp_path: Path) -> None:
    from topkube.training.checkpoint.host_copies import HostCopies

    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False))
    model[1].weight = model[0].weight
    with HostCopies().take() as copy:
        state = encode({"model": model.state_dict()}, copy)
    written = write_state(tmp_path / "a.pt", state)
    assert written.bytes < 1.2 * 300 * 300 * 4
    loaded = read_state(tmp_path / "a.pt", written)["model"]
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()
    assert torch.equal(loaded["1.weight"], model[0].weight)


def test_pinned_buffers_count_with_all_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from topkube.training.checkpoint.host_copies import HostCopies, NoRoom

    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **options: allocate(*sizes, **options))
    on_gpu: Any = SimpleNamespace(
        is_cuda=True, shape=(100,), dtype=torch.uint8, numel=lambda: 100, element_size=lambda: 1
    )
    copies = HostCopies()
    copies._budget = 250
    copies._take_buffer("first", on_gpu)  # torch allocates 128 bytes
    with pytest.raises(NoRoom):
        copies._take_buffer("second", on_gpu)


def test_pinned_buffers_that_have_no_room_are_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    from topkube.training.checkpoint import host_copies

    buffers: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []
    allocate = torch.empty

    def note_buffer(*sizes: Any, **options: Any) -> torch.Tensor:
        buffer = allocate(*sizes, **options)
        buffers.append(weakref.ref(buffer))
        return buffer

    def empty_cache() -> None:
        left.append(sum(buffer() is not None for buffer in buffers))

    monkeypatch.setattr(torch, "empty", note_buffer)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_emptyHostCache", empty_cache, raising=False)
    monkeypatch.setattr(host_copies, "find_available_bytes", lambda: 2000)
    state = {"first": torch.ones(300), "second": torch.ones(300)}
    assert not host_copies.HostCopies().encode(state)[1]
    assert len(buffers) == 1
    assert left == [0]
