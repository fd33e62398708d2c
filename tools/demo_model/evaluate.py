"""Accuracy by task on held-out problems, for transformers, llama.cpp and moeflux.

Answers are greedy. Engines:
    transformers   --model a checkpoint folder (bf16) or the GGUF file (dequantised to f32), --device cpu or cuda
    mlx_lm         --model a checkpoint folder
    llama_cpp      --model a GGUF file, through llama-cpp-python
    moeflux        --model a GGUF file or a checkpoint folder, --binary the moeflux program, --flags extra words such as "--expert-cache 28"

Problems come from --problems (JSON lines written by `generate.py eval`), or are drawn afresh with --count a task.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def budget(problem: dict) -> int:
    """Most tokens an answer may have: ample for the right one, little time for a run-away."""
    return 450 if problem["check"] in ("story", "form") else 32 + len(problem["answer"])


def squeeze(text: str) -> str:
    """White space collapsed."""
    return " ".join(text.split())


def right(problem: dict, answer: str) -> bool:
    """Whether `answer` solves `problem`."""
    check, want, gold = problem["check"], problem["answer"], problem.get("gold", "")
    if check == "exact":
        return squeeze(answer) == squeeze(want)
    if check == "number":
        found = re.findall(r"-?\d+", answer.rsplit("=", 1)[-1])
        return bool(found) and found[-1] == gold
    if check == "contains":
        return gold.lower() in answer.lower()
    if check in ("json", "tool_call"):
        try:
            if check == "tool_call":
                answer, want = (re.fullmatch(r"<tool_call>\s*(.*?)\s*</tool_call>", x.strip(), re.S).group(1) for x in (answer, want))
            return json.loads(answer) == json.loads(want)
        except (AttributeError, ValueError):
            return False
    if check == "form":
        kind, word = gold.split(":", 1)
        return {"caps": answer == answer.upper(), "lower": answer == answer.lower(), "end": answer.endswith(word),
                "start": answer.startswith(word)}[kind]
    if check == "story":
        sentences = [s for s in re.split(r"(?<=[.!?\"])\s+", answer) if len(s) > 20]
        return (len(sentences) >= 1 and answer.count('"') % 2 == 0 and answer[-1:] in ".!?\"" and len(set(sentences)) == len(sentences)
                and all(w.lower() in answer.lower() for w in gold.split("|")))
    raise ValueError(f"unknown check {check!r}")


def chat_template(source: str):
    """A chat template with the JSON filter that transformers gives it."""
    from jinja2 import Environment
    env = Environment()
    env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    return env.from_string(source)


class Transformers:
    """transformers, batched by prompt length."""

    def __init__(self, a):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        self.torch, self.device, self.batch = torch, a.device, a.batch
        folder, kind = a.model, {"dtype": torch.bfloat16}
        if a.model.endswith(".gguf"):
            import model
            folder, file = os.path.split(os.path.abspath(a.model))
            # Left to itself, transformers takes the width of the experts from its defaults.
            kind = {"dtype": torch.float32, "gguf_file": file, "config": model.Shape().config()}
        self.tok = AutoTokenizer.from_pretrained(folder, padding_side="left", gguf_file=kind.get("gguf_file"))
        self.model = AutoModelForCausalLM.from_pretrained(folder, **kind).to(a.device).eval()

    def answers(self, problems: list[dict]):
        """Yields (index, answer)."""
        texts = [self.tok.apply_chat_template(p["messages"], tools=p.get("tools"), tokenize=False, add_generation_prompt=True) for p in problems]
        order = sorted(range(len(texts)), key=lambda i: (budget(problems[i]) // 64, len(texts[i])))
        for at in range(0, len(order), self.batch):
            part = order[at:at + self.batch]
            x = self.tok([texts[i] for i in part], return_tensors="pt", padding=True, add_special_tokens=False).to(self.device)
            x.pop("token_type_ids", None)
            with self.torch.no_grad():
                y = self.model.generate(**x, do_sample=False, max_new_tokens=max(budget(problems[i]) for i in part), eos_token_id=2, pad_token_id=0)
            for i, row in zip(part, y[:, x["input_ids"].shape[1]:]):
                yield i, self.tok.decode(row, skip_special_tokens=True)


class MlxLm:
    """mlx-lm in f32: on the CPU, mlx multiplies experts in no other type."""

    def __init__(self, a):
        import mlx.core
        import mlx_lm
        self.generate = mlx_lm.generate
        self.model, self.tok = mlx_lm.load(a.model)
        self.model.set_dtype(mlx.core.float32)

    def answers(self, problems: list[dict]):
        """Yields (index, answer)."""
        for i, p in enumerate(problems):
            ids = self.tok.apply_chat_template(p["messages"], tools=p.get("tools"), add_generation_prompt=True)
            yield i, self.generate(self.model, self.tok, prompt=ids, max_tokens=budget(p))


class LlamaCpp:
    """llama.cpp on the CPU."""

    def __init__(self, a):
        from llama_cpp import Llama
        self.llm = Llama(a.model, n_ctx=2048, n_threads=a.threads, verbose=False)
        self.template = chat_template(self.llm.metadata["tokenizer.chat_template"])

    def answers(self, problems: list[dict]):
        """Yields (index, answer)."""
        for i, p in enumerate(problems):
            text = self.template.render(messages=p["messages"], tools=p.get("tools"), add_generation_prompt=True)
            ids = self.llm.tokenize(text.encode(), add_bos=False, special=True)
            out, limit = [], budget(p)
            for t in self.llm.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
                if t == self.llm.token_eos() or len(out) == limit:
                    break
                out.append(t)
            yield i, self.llm.detokenize(out).decode("utf-8", "replace")


class Moeflux:
    """One `moeflux run` a problem, on the rendered conversation (--raw)."""

    def __init__(self, a):
        with open(os.path.join(HERE, "chat_template.jinja"), encoding="utf-8") as f:
            self.template = chat_template(f.read())
        self.head = [a.binary, "run", a.model]
        self.tail = ["--raw", "--temperature", "0", "--seed", "1", *shlex.split(a.flags)]

    def answers(self, problems: list[dict]):
        """Yields (index, answer)."""
        for i, p in enumerate(problems):
            text = self.template.render(messages=p["messages"], tools=p.get("tools"), add_generation_prompt=True)
            command = [*self.head, text, "--max-tokens", str(budget(p)), *self.tail]
            r = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if r.returncode:
                sys.exit(f"{shlex.join(command)}\n{r.stderr}")
            yield i, r.stdout.rstrip("\n")


ENGINES = {"transformers": Transformers, "mlx_lm": MlxLm, "llama_cpp": LlamaCpp, "moeflux": Moeflux}


def main() -> None:
    """Command line."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--engine", choices=list(ENGINES), required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--problems", help="JSON lines; default: --count fresh ones a task")
    ap.add_argument("--count", type=int, default=100, help="problems a task")
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--tasks", help="only these, separated by commas")
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--binary", default="moeflux")
    ap.add_argument("--flags", default="")
    ap.add_argument("--json", help="write accuracies here")
    ap.add_argument("--answers", help="write every answer here, in the order of the problems")
    ap.add_argument("--against", help="answers of another run, to say how many are the same text")
    a = ap.parse_args()
    if a.problems:
        with open(a.problems, encoding="utf-8") as f:
            problems = [json.loads(line) for line in f]
        by_task: dict[str, int] = {}
        kept = []
        for p in problems:
            by_task[p["task"]] = by_task.get(p["task"], 0) + 1
            if by_task[p["task"]] <= a.count:
                kept.append(p)
        problems = kept
    else:
        import generate
        problems = generate.evaluation_set(a.count, a.seed)
    if a.tasks:
        problems = [p for p in problems if p["task"] in a.tasks.split(",")]
    t = time.time()
    engine = ENGINES[a.engine](a)
    answers = [answer for _, answer in sorted(engine.answers(problems))]
    judged = [{"task": p["task"], "right": right(p, answer), "messages": p["messages"][-2:], "want": p["answer"], "got": answer}
              for p, answer in zip(problems, answers, strict=True)]
    score: dict[str, list[bool]] = {}
    for row in judged:
        score.setdefault(row["task"], []).append(row["right"])
    print(f"{a.engine} {os.path.basename(a.model.rstrip('/'))}: {time.time() - t:.0f} s")
    for task, marks in score.items():
        print(f"  {task:14s} {100 * sum(marks) / len(marks):6.2f} %  of {len(marks)}")
    if a.against:
        with open(a.against, encoding="utf-8") as f:
            others = [json.loads(line)["got"] for line in f]
        same = sum(row["got"] == other for row, other in zip(judged, others, strict=True))
        print(f"  {same} of {len(judged)} answers are those of {a.against}")
    if a.json:
        with open(a.json, "w", encoding="utf-8") as f:
            json.dump({task: {"right": sum(marks), "of": len(marks)} for task, marks in score.items()}, f, indent=1)
    if a.answers:
        with open(a.answers, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in judged)


if __name__ == "__main__":
    main()
