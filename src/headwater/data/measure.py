"""Measures the prompt lengths of all rows. The number of worker processes never changes the result."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import get_context

from headwater.core.errors import DataError
from headwater.data.prompt_builder import PromptBuilder
from headwater.data.row_store import PlacedRow

ROWS_PER_CHUNK = 256
MIN_ROWS_FOR_WORKERS = 20_000
"""With fewer rows, starting worker processes takes longer than measuring in this one."""
TEXT_ROWS_PER_IMAGE = 64
"""A row with images takes about as long as this many rows of text, and needs more memory."""
MAX_AUTO_WORKERS = 8
MIN_ROWS_FOR_BAR = 2_000

ReadRow = Callable[[int], PlacedRow]
Measured = tuple[list[int], DataError | None]
"""Lengths up to the first invalid row of a chunk, and the error of that row."""
Chunks = Iterator[tuple[list[PlacedRow], DataError | None]]


def choose_num_workers(num_asked: int, num_rows: int, has_media: bool = False) -> int:
    """``num_asked`` 0 chooses by the number of rows and cores. There are never more workers than chunks of rows."""
    num_chunks = -(-num_rows // _rows_per_chunk(has_media))
    if num_asked == 0:
        cost = num_rows * TEXT_ROWS_PER_IMAGE if has_media else num_rows
        num_asked = 1 if cost < MIN_ROWS_FOR_WORKERS else min(_num_cores(), MAX_AUTO_WORKERS)
    return max(1, min(num_asked, num_chunks))


def _rows_per_chunk(has_media: bool) -> int:
    return max(1, ROWS_PER_CHUNK // TEXT_ROWS_PER_IMAGE) if has_media else ROWS_PER_CHUNK


def measure_lengths(
    read_row: ReadRow, num_rows: int, builder: PromptBuilder, num_workers: int, has_media: bool = False
) -> list[int]:
    """Number of prompt tokens of rows 0..num_rows-1. Raises the error of the first row that cannot be built."""
    measure = _measure_here if num_workers == 1 else _measure_in_workers
    chunks = _read_chunks(read_row, num_rows, _rows_per_chunk(has_media))
    lengths: list[int] = []
    # Closing the generator ends the worker processes at the first error, not when its traceback is freed.
    with _progress_bar(num_rows) as show, closing(measure(chunks, builder, num_workers)) as results:
        for measured, error in results:
            if error is not None:
                raise error
            lengths += measured
            show(len(lengths))
    return lengths


def _measure_here(chunks: Chunks, builder: PromptBuilder, _: int) -> Generator[Measured, None, None]:
    for rows, read_error in chunks:
        yield _first_error(_measure_rows(builder, rows), read_error)


def _measure_in_workers(chunks: Chunks, builder: PromptBuilder, num_workers: int) -> Generator[Measured, None, None]:
    """This process reads the rows and sends them to the workers: every kind of source works and memory is bounded."""
    pool = ProcessPoolExecutor(
        num_workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(_pickled(builder),)
    )
    in_flight: deque[tuple[Future[Measured], DataError | None]] = deque()
    try:
        for rows, read_error in chunks:
            in_flight.append((pool.submit(_measure_in_worker, rows), read_error))
            if len(in_flight) > 2 * num_workers:
                future, error_of_oldest = in_flight.popleft()
                yield _first_error(future.result(), error_of_oldest)
        for future, read_error in in_flight:
            yield _first_error(future.result(), read_error)
    except BrokenProcessPool as error:
        raise DataError(
            "data.num_filter_workers: the processes that measure prompt lengths died; guard your script with "
            "if __name__ == '__main__', or set data.num_filter_workers=1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _read_chunks(read_row: ReadRow, num_rows: int, rows_per_chunk: int) -> Chunks:
    """Chunks of rows. A row that cannot be read ends the stream; its error is returned with the rows before it."""
    for start in range(0, num_rows, rows_per_chunk):
        rows: list[PlacedRow] = []
        for index in range(start, min(start + rows_per_chunk, num_rows)):
            try:
                rows.append(read_row(index))
            except DataError as error:
                yield rows, error
                return
        yield rows, None


def _measure_rows(builder: PromptBuilder, rows: list[PlacedRow]) -> Measured:
    lengths: list[int] = []
    for placed in rows:
        try:
            lengths.append(len(builder.build(placed).tokens))
        except DataError as error:
            return lengths, error
    return lengths, None


def _first_error(measured: Measured, read_error: DataError | None) -> Measured:
    lengths, error = measured
    return lengths, error or read_error


_worker_builder: PromptBuilder | None = None
"""Set once in each worker process, so that the tokenizer is not sent with every chunk."""


def _start_worker(pickled_builder: bytes) -> None:
    global _worker_builder
    _worker_builder = pickle.loads(pickled_builder)


def _measure_in_worker(rows: list[PlacedRow]) -> Measured:
    assert _worker_builder is not None, "the pool was started without its initializer"
    return _measure_rows(_worker_builder, rows)


def _pickled(builder: PromptBuilder) -> bytes:
    try:
        return pickle.dumps(builder)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise DataError(
            f"data.num_filter_workers: the tokenizer or processor cannot be sent to another process ({error}); "
            "set data.num_filter_workers=1"
        ) from error


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _progress_bar(num_rows: int) -> Iterator[Callable[[int], None]]:
    """Shown on a terminal, for large datasets."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = num_rows <= MIN_ROWS_FOR_BAR or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("Measuring prompts", total=num_rows)
        yield lambda completed: progress.update(task, completed=completed)
