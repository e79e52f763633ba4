"""Batches are counted where training takes them: the first loader, over its epochs, in the thread that watches."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import tensorprobe
from tensorprobe.taps.step_taps import LoaderTap

ORIGINAL = _BaseDataLoaderIter.__next__


class Counted:
    """A tap that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.tap = LoaderTap(lambda n: self.told.append(f"before {n}"), lambda n: self.told.append(f"after {n}"))


@pytest.fixture
def counted() -> Iterator[Counted]:
    watch = Counted()
    watch.tap.install()
    yield watch
    watch.tap.remove()
    assert _BaseDataLoaderIter.__next__ is ORIGINAL


def loader(size: int = 4, **more: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(size)), batch_size=2, **more)


def test_batches_are_told_before_and_after_they_come(counted: Counted) -> None:
    batches = [batch[0].tolist() for batch in loader()]
    assert batches == [[0, 1], [2, 3]]
    assert counted.told == ["before 0", "after 0", "before 1", "after 1", "before 2"]
    assert counted.tap.batches == 2


def test_epochs_of_one_loader_count_on(counted: Counted) -> None:
    data = loader()
    assert [len(list(data)) for _ in range(2)] == [2, 2]
    assert counted.tap.batches == 4


def test_a_second_loader_is_not_counted_while_the_first_lives(counted: Counted) -> None:
    train, validation = loader(), loader(8)
    for _ in train:
        list(validation)
    assert counted.tap.batches == 2


def test_when_the_counted_loader_is_gone_the_next_goes_on(counted: Counted) -> None:
    next(iter(loader()))
    next(iter(loader()))
    assert counted.told == ["before 0", "after 0", "before 1", "after 1"]


def test_an_empty_loader_is_not_taken(counted: Counted) -> None:
    empty, train = loader(0), loader()
    assert list(empty) == []
    list(train)
    list(empty)
    assert counted.tap.batches == 2


def test_a_list_as_batch_sampler_is_a_loader_too(counted: Counted) -> None:
    data = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=[[0, 1], [2, 3]])
    list(data)
    list(loader())
    assert counted.tap.batches == 2


class Nested(Dataset[Any]):
    """Each item takes one from a loader of its own."""

    def __init__(self) -> None:
        self.inner = iter(loader(8))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: int) -> Any:
        return next(self.inner)[0].sum()


def test_a_loader_inside_of_a_loader_is_not_counted(counted: Counted) -> None:
    assert len(list(DataLoader(Nested()))) == 2
    assert counted.told == ["before 0", "after 0", "before 1", "after 1", "before 2"]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


def test_workers_count_nothing_and_their_batches_come_through(counted: Counted) -> None:
    batches = list(DataLoader(Stream(), batch_size=2, num_workers=1))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert counted.tap.batches == 2


def test_batches_for_another_thread_are_told_apart(counted: Counted) -> None:
    thread = threading.Thread(target=lambda: list(loader()))
    thread.start()
    thread.join()
    assert (counted.tap.batches, counted.tap.elsewhere) == (0, 3)


def test_what_before_raises_takes_the_place_of_the_batch() -> None:
    def before(number: int) -> None:
        if number == 1:
            tap.remove()
            raise RuntimeError("enough")

    tap = LoaderTap(before, lambda number: None)
    tap.install()
    seen = []
    with pytest.raises(RuntimeError, match="enough"):
        seen.extend(batch[0].tolist() for batch in loader())
    assert _BaseDataLoaderIter.__next__ is ORIGINAL


class Mine(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch[0] * 10


def test_subclasses_and_pickles_are_as_before(counted: Counted) -> None:
    mine = Mine(TensorDataset(torch.arange(2)), batch_size=2)
    again = pickle.loads(pickle.dumps(mine))
    assert [batch.tolist() for batch in again] == [[0, 10]]
    assert "__next__" not in vars(DataLoader)


def test_a_wrapper_around_ours_stays_and_ours_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is put back at the end, whatever comes between.
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", ORIGINAL)
    watch = Counted()
    watch.tap.install()
    ours = _BaseDataLoaderIter.__next__
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", lambda iterator: ours(iterator))
    watch.tap.remove()
    assert len(list(loader())) == 2
    assert watch.told == []


def test_a_step_inside_the_step_of_a_subclass_is_one_step(tmp_path: Path) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = torch.nn.Linear(2, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)  # torch watches the step of a class once the class was used
    optimizer = Twice(model.parameters(), lr=0.1)
    with tensorprobe.capture(tmp_path / "run", model=model, steps_by="optimizer"):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    run = tensorprobe.open_run(tmp_path / "run")
    assert {step for step in run.steps if list(run.calls(step=step))} == {0, 1, 2}
