"""Answers every row of Parquet files with workers of a Ray cluster, and goes on where an earlier run ended.

    python examples/ray/batch.py prompts.parquet answers --model demo --workers 2 --memory 64MiB

The input has a column of unique ids and one of prompts: texts, or lists of messages with `role` and `content`. A batch of rows
becomes one file in the output folder, under its final name only once it is complete. What decides whether a row is done is
therefore the output folder alone: whatever is killed and whenever, a later run answers the rows that are missing. With the seed
an answer on the CPU depends on its prompt only, so it does not matter which worker gives it, or in which run.
"""

import argparse
import asyncio
import hashlib
import os
import pathlib
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import ray
import ray.data

import moeflux

OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "seed")


class Answers:
    """A worker: one open model, which answers several batches at a time so that none waits for another's longest answer."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.output = pathlib.Path(arguments.output)
        self.options = {name: getattr(arguments, name) for name in OPTIONS}
        self.model = moeflux.open(
            arguments.model,
            backend=arguments.backend,
            memory=arguments.memory,
            threads=arguments.threads,
            sequences=arguments.sequences,
        )

    async def __call__(self, batch: pa.Table) -> AsyncIterator[dict[str, np.ndarray]]:
        began = time.monotonic()
        ids = batch[self.arguments.id_column]
        prompts = batch[self.arguments.prompt_column].to_pylist()
        results = await asyncio.gather(*(self.answer(prompt) for prompt in prompts))
        answers = pa.Table.from_pylist(results, schema=ANSWER)
        await asyncio.to_thread(write, answers.add_column(0, self.arguments.id_column, ids), self.output, ids)
        yield {
            "worker": np.array([os.getpid()]),
            "rows": np.array([batch.num_rows]),
            "failed": np.array([batch.num_rows - answers["error"].null_count]),
            "tokens": np.array([sum(answers["tokens"].to_pylist())]),
            "seconds": np.array([time.monotonic() - began]),
        }

    async def answer(self, prompt: Any) -> dict[str, Any]:
        """What a row's prompt gets; a prompt that cannot be answered, such as one that is too long, gets an error."""
        try:
            answer = await self.model.stream(prompt, **self.options)
        except (moeflux.ContextFullError, ValueError) as error:
            return {"answer": None, "finish": "error", "tokens": 0, "error": str(error)}
        return {"answer": answer.text, "finish": answer.finish, "tokens": len(answer.tokens), "error": None}


ANSWER = pa.schema(
    [("answer", pa.string()), ("finish", pa.string()), ("tokens", pa.int64()), ("error", pa.string())]
)


def write(rows: pa.Table, output: pathlib.Path, ids: pa.ChunkedArray) -> None:
    """Writes a part whole or not at all, under a name that the ids give: a batch that is repeated replaces its part."""
    name = hashlib.sha256("\n".join(map(str, ids.to_pylist())).encode()).hexdigest()[:32]
    unfinished = output / f".{name}.{os.getpid()}"
    with open(unfinished, "wb") as file:
        pyarrow.parquet.write_table(rows, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(output / f"{name}.parquet")


def done(output: pathlib.Path, id_column: str) -> pa.ChunkedArray | None:
    """The ids of all rows that have an answer."""
    parts = sorted(output.glob("*.parquet"))
    return pyarrow.dataset.dataset(parts).to_table([id_column])[id_column] if parts else None


class Missing:
    """Leaves rows without those that are done."""

    def __init__(self, ids: ray.ObjectRef, id_column: str):
        self.ids, self.id_column = ray.get(ids), id_column

    def __call__(self, batch: pa.Table) -> pa.Table:
        return batch.filter(pa.compute.invert(pa.compute.is_in(batch[self.id_column], value_set=self.ids)))


def missing_rows(arguments: argparse.Namespace, ids: pa.ChunkedArray | None) -> ray.data.Dataset:
    """The rows of the input without those that are done, in blocks of a batch each.

    They are read before the workers start, as those may take all processors of the cluster.
    """
    rows = ray.data.read_parquet(arguments.input)
    rows = rows.select_columns([arguments.id_column, arguments.prompt_column])
    if ids is not None:
        rows = rows.map_batches(
            Missing,
            fn_constructor_args=[ray.put(ids.combine_chunks()), arguments.id_column],
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=1),
        )
    return rows.repartition(target_num_rows_per_block=arguments.batch, strict=True).materialize()


def answer_all(rows: ray.data.Dataset, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Answers rows; gives what every batch took, as they end."""
    return rows.map_batches(
        Answers,
        fn_constructor_args=[arguments],
        batch_size=arguments.batch,
        batch_format="pyarrow",
        num_cpus=arguments.threads,
        num_gpus=arguments.gpus,
        compute=ray.data.ActorPoolStrategy(
            size=arguments.workers,
            max_tasks_in_flight_per_actor=2 * arguments.batches,
            max_concurrent_calls_per_actor=arguments.batches,
        ),
    ).iter_rows()


def check(arguments: argparse.Namespace) -> None:
    """Every row of the input has one answer."""
    ids = done(pathlib.Path(arguments.output), arguments.id_column)
    expected = pyarrow.dataset.dataset(arguments.input).to_table([arguments.id_column])[arguments.id_column]
    if sorted([] if ids is None else ids.to_pylist()) != sorted(expected.to_pylist()):
        sys.exit(f"{arguments.output} does not have every row of {arguments.input} once: are the ids unique?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="a Parquet file, or a folder of them")
    parser.add_argument("output", help="folder of the answers, which all machines of the cluster see")
    parser.add_argument("--model", default="demo", help="a GGUF file, a safetensors folder, or a model's name")
    parser.add_argument("--id-column", default="id")
    parser.add_argument("--prompt-column", default="prompt")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--memory", help="each worker's, such as 6GiB")
    parser.add_argument("--threads", type=int, default=1, help="each worker's")
    parser.add_argument("--gpus", type=float, default=0, help="each worker's")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--sequences", type=int, default=8, help="answers that a worker writes at the same time")
    parser.add_argument("--batch", type=int, default=32, help="rows of a part")
    parser.add_argument("--batches", type=int, default=2, help="batches that a worker answers at the same time")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.input, arguments.output = map(os.path.abspath, (arguments.input, arguments.output))
    os.makedirs(arguments.output, exist_ok=True)

    ray.data.DataContext.get_current().enable_progress_bars = False
    ids = done(pathlib.Path(arguments.output), arguments.id_column)
    print(f"{0 if ids is None else len(ids)} rows are done already", flush=True)
    rows = tokens = failed = 0
    began = said = time.monotonic()
    missing = missing_rows(arguments, ids)
    total = missing.count()
    for part in answer_all(missing, arguments):
        rows, tokens, failed = rows + part["rows"], tokens + part["tokens"], failed + part["failed"]
        now = time.monotonic()
        if rows == part["rows"]:
            began = now - part["seconds"]  # Opening the models is not part of the speed.
        if now - said >= 2:
            said = now
            print(f"{rows} of {total} rows, {tokens} tokens, {tokens / (now - began):.0f} tokens/s", flush=True)
    seconds = time.monotonic() - began
    speed = tokens / seconds if rows else 0
    print(f"{rows} rows, {failed} of them failed, {tokens} tokens in {seconds:.1f} s: {speed:.0f} tokens/s")
    check(arguments)


if __name__ == "__main__":
    main()
