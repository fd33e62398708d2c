"""Trains the demo model on one GPU within a time limit, the last part through Q4_K/Q6_K rounding.

Matrices are updated by Muon (orthogonalised momentum, Jordan et al. 2024), embeddings, routers and norms by AdamW.
f32 master weights are kept apart from the bf16 copy that the model runs on; from `--round-from` of the time on, that
copy is first rounded to the block types of the shipped file, and gradients pass straight through the rounding.
Worker processes generate the data while the model trains, so nothing is stored and no conversation comes twice.

Writes to --out: checkpoint/ (transformers, bf16), rounded/ (the same with the weights as the shipped file rounds them),
log.csv and facts.json.
"""

import argparse
import csv
import json
import math
import multiprocessing
import os
import queue
import shutil
import threading
import time

import numpy as np
import torch

import generate
import model
import quant

MUON = ("q", "k", "v", "o", "gate_up", "down", "eh_proj")


# ---------------------------------------------------------------- data

def _worker(index: int, step: int, rows: int, length: int, tokenizer: str, folder: str, ahead: int) -> None:
    """Writes shards index, index + step, …; waits while `ahead` of its shards are unread."""
    os.nice(5)
    n = index
    while True:
        while sum(f.startswith(f"{index:03d}_") for f in os.listdir(folder)) >= ahead:
            time.sleep(0.05)
        ids, weights, number = generate.shard(n, rows, tokenizer, length)
        path = os.path.join(folder, f"{index:03d}_{n:09d}.npy")
        np.save(path + ".tmp.npy", np.stack([ids, weights.astype(np.uint16) << 8 | number]))
        os.rename(path + ".tmp.npy", path)
        n += step


class Rows:
    """An endless stream of batches of packed rows of `length` tokens, in shard order."""

    def __init__(self, workers: int, rows: int, batch: int, tokenizer: str, device: str, first_shard: int, length: int = generate.ROW):
        self.folder = os.path.join("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp", f"moeflux_demo_{os.getpid()}")
        os.makedirs(self.folder)
        ctx = multiprocessing.get_context("spawn")
        self.procs = [ctx.Process(target=_worker, daemon=True, args=(first_shard + i, workers, rows, length, tokenizer, self.folder, 3))
                      for i in range(workers)]
        for p in self.procs:
            p.start()
        self.first, self.workers, self.batch, self.length, self.device = first_shard, workers, batch, length, device
        self.queue: queue.Queue = queue.Queue(6)
        self.waited = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        n, held = self.first, np.zeros((2, 0, self.length), np.uint16)
        while True:
            path = os.path.join(self.folder, f"{self.first + (n - self.first) % self.workers:03d}_{n:09d}.npy")
            while not os.path.exists(path):
                time.sleep(0.01)
            held = np.concatenate([held, np.load(path)], 1)
            os.remove(path)
            while held.shape[1] >= self.batch:
                self.queue.put(to_device(held[:, :self.batch], self.device))
                held = held[:, self.batch:]
            n += 1

    def next(self):
        """ids, targets, target weights, conversation numbers: each [batch, length]."""
        t = time.time()
        b = self.queue.get()
        self.waited += time.time() - t
        return b

    def close(self) -> None:
        """Ends the workers."""
        for p in self.procs:
            p.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def to_device(a: np.ndarray, device: str):
    """One packed array [2, batch, length] as model inputs."""
    ids = torch.from_numpy(a[0].astype(np.int64))
    w = torch.from_numpy((a[1] >> 8).astype(np.float32))
    number = torch.from_numpy((a[1] & 255).astype(np.int32))
    target, weight = torch.roll(ids, -1, 1), torch.roll(w, -1, 1)
    weight[:, -1] = 0
    if device == "cuda":
        return tuple(x.pin_memory().to(device, non_blocking=True) for x in (ids, target, weight, number))
    return ids, target, weight, number


# ---------------------------------------------------------------- optimisation

def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices to (…, rows, cols), by five Newton–Schulz steps in bf16."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Muon for the stacked matrices, AdamW for the rest. `scale` multiplies both learning rates."""

    def __init__(self, master: dict[str, torch.Tensor], muon_lr: float, adam_lr: float, decay: float):
        self.master, self.muon_lr, self.adam_lr, self.decay, self.t = master, muon_lr, adam_lr, decay, 0
        self.m = {k: torch.zeros_like(v) for k, v in master.items()}
        self.v = {k: torch.zeros_like(v) for k, v in master.items() if k not in MUON}

    @torch.no_grad()
    def step(self, grads: dict[str, torch.Tensor], scale: float, momentum: float) -> None:
        """One update."""
        self.t += 1
        for k, p in self.master.items():
            g, m = grads[k].float(), self.m[k]
            if k in MUON:
                m.lerp_(g, 1 - momentum)
                u = g.lerp(m, momentum)
                if k == "gate_up":
                    u = u.unflatten(2, (2, -1))
                u = orthogonal(u) * max(1.0, u.shape[-2] / u.shape[-1]) ** 0.5
                lr = self.muon_lr * scale
                p.mul_(1 - lr * self.decay).sub_(u.reshape(p.shape), alpha=lr)
            else:
                v = self.v[k]
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.05)
                lr = self.adam_lr * scale
                u = (m / (1 - 0.9 ** self.t)) / ((v / (1 - 0.95 ** self.t)).sqrt() + 1e-10)
                p.sub_(u, alpha=lr)


@torch.no_grad()
def working_copy(master: dict[str, torch.Tensor], kinds: dict[str, list[str]], rounding: bool) -> dict[str, torch.Tensor]:
    """The bf16 weights that the model runs on."""
    out = {}
    for k, w in master.items():
        if rounding and k in kinds:
            w = quant.rounded_stack(w, kinds[k])
        out[k] = w.bfloat16().requires_grad_()
    return out


def main() -> None:
    """Command line."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--minutes", type=float, default=8.0, help="training time after compilation")
    ap.add_argument("--deadline", type=float, help="Unix time by which training ends, whatever --minutes says")
    ap.add_argument("--rows", type=int, default=32, help="rows of 2048 tokens a step")
    ap.add_argument("--muon-lr", type=float, default=0.02)
    ap.add_argument("--adam-lr", type=float, default=0.003)
    ap.add_argument("--decay", type=float, default=0.02)
    ap.add_argument("--balance", type=float, default=0.001, help="weight of the load-balancing loss")
    ap.add_argument("--balance-until", type=float, default=0.15, help="share of the time after which popularity is left alone")
    ap.add_argument("--round-from", type=float, default=0.55, help="share of the time after which weights are rounded")
    ap.add_argument("--decay-from", type=float, default=0.45, help="share of the time after which the learning rate falls to zero")
    ap.add_argument("--start", help="checkpoint folder whose weights training starts from")
    ap.add_argument("--first-shard", type=int, default=0, help="skip the data of an earlier run")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--workers", type=int, default=15)
    ap.add_argument("--shard-rows", type=int, default=512)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--tiny", action="store_true", help="a very small shape, to try the script on a CPU")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)

    shape = model.Shape() if not a.tiny else model.Shape(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2)
    kinds = model.quantization(shape)
    cuda = a.device == "cuda"
    master = model.load(shape, a.start) if a.start else model.init(shape, a.seed)
    master = {k: v.to(a.device) for k, v in master.items()}
    size = sum(v.numel() for v in master.values())
    print(f"{size / 1e6:.1f} M parameters", flush=True)
    data = Rows(a.workers, a.shard_rows, a.rows, a.tokenizer, a.device, a.first_shard)
    held = generate.shard(10**7, a.rows + 40, a.tokenizer)
    held = to_device(np.stack([held[0], held[1].astype(np.uint16) << 8 | held[2]])[:, :a.rows], a.device)
    cos, sin = model.rope_tables(shape, generate.ROW, a.device, torch.bfloat16)
    make_mask = torch.compile(model.conversation_mask, dynamic=False) if cuda else model.conversation_mask
    held_mask = model.conversation_mask(held[3], False)

    def loss_of(p, ids, target, weight, mask):
        h, balance, counts = model.forward(shape, p, ids, mask, cos, sin, cuda)
        logits = (h @ p["embed"].T).float().flatten(0, 1)
        ce = torch.nn.functional.cross_entropy(logits, target.flatten(), reduction="none")
        w = weight.flatten()
        return (ce * w).sum() / w.sum().clamp(min=1.0), balance, counts

    run = torch.compile(loss_of, dynamic=False) if cuda else loss_of
    opt = Optimizer(master, a.muon_lr, a.adam_lr, a.decay)

    def one_step(scale: float, momentum: float, rounding: bool, even: float):
        ids, target, weight, number = data.next()
        p = working_copy(master, kinds, rounding)
        loss, balance, counts = run(p, ids, target, weight, make_mask(number, cuda))
        (loss + even * balance).backward()
        opt.step({k: v.grad for k, v in p.items()}, scale, momentum)
        return loss.detach(), balance.detach(), counts.detach()

    t = time.time()
    for _ in range(3 if cuda else 1):
        first = one_step(0.0, 0.9, True, 0.0)[0].item()
    opt.t = 0
    for x in [*opt.m.values(), *opt.v.values()]:
        x.zero_()
    print(f"compiled in {time.time() - t:.0f} s, first loss {first:.3f}", flush=True)

    log = open(os.path.join(a.out, "log.csv"), "w", encoding="utf-8", newline="")
    writer = csv.writer(log)
    writer.writerow(["step", "tokens", "seconds", "loss", "validation", "balance", "rounding", "lr_scale"])
    start, step, data.waited = time.time(), 0, 0.0
    limit = a.minutes * 60
    if a.deadline:
        limit = max(1.0, min(limit, a.deadline - start))
    recent, usage = [], torch.zeros(shape.num_hidden_layers, shape.num_experts, device=a.device)
    every = 50 if cuda else 2
    while (now := (time.time() - start) / limit) < 1:
        scale = min(1.0, (step + 1) / 200, max(0.0, (1 - now) / (1 - a.decay_from)))
        rounding = now >= a.round_from
        loss, balance, counts = one_step(scale, 0.85 + 0.1 * min(1.0, step / 300), rounding,
                                         a.balance if now < a.balance_until else 0.0)
        recent.append(loss)
        usage = usage * 0.99 + counts * 0.01
        step += 1
        if step % every == 0:
            mean = torch.stack(recent).mean().item()
            recent = []
            val = ""
            if step % (10 * every) == 0:
                with torch.no_grad():
                    p = {k: v.detach() for k, v in working_copy(master, kinds, rounding).items()}
                    h, _, _ = model.forward(shape, p, held[0], held_mask, cos, sin, False)
                    ce = torch.nn.functional.cross_entropy((h @ p["embed"].T).float().flatten(0, 1), held[1].flatten(), reduction="none")
                    val = round(((ce * held[2].flatten()).sum() / held[2].sum()).item(), 5)
            el = time.time() - start
            writer.writerow([step, step * a.rows * generate.ROW, round(el, 1), round(mean, 5), val, round(balance.item(), 4), int(rounding), round(scale, 4)])
            log.flush()
            if step % (4 * every) == 0 or val != "":
                print(f"step {step} {step * a.rows * generate.ROW / 1e6:.0f}M tok {el:.0f}s {step * a.rows * generate.ROW / el / 1e6:.2f}M tok/s "
                      f"wait {data.waited:.1f}s loss {mean:.4f} val {val} balance {balance.item():.3f} scale {scale:.3f}", flush=True)
            if not math.isfinite(mean):
                raise FloatingPointError(f"loss {mean} at step {step}")
    data.close()
    log.close()
    seconds = time.time() - start
    skew = (usage / usage.sum(-1, keepdim=True)).sort(-1, descending=True).values
    facts = {"parameters": size, "steps": step, "tokens": step * a.rows * generate.ROW, "seconds": round(seconds, 1), "rows": a.rows,
             "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__, "arguments": {k: v for k, v in vars(a).items() if k not in ("out", "tokenizer", "deadline", "start")},
             "expert_share_sorted_by_layer": [[round(x, 4) for x in row] for row in skew.tolist()]}
    with open(os.path.join(a.out, "facts.json"), "w", encoding="utf-8") as f:
        json.dump(facts, f, indent=1)
    master = {k: v.bfloat16().float() for k, v in master.items()}  # so that the checkpoint quantises to what "rounded" holds
    for name, weights in (("checkpoint", master), ("rounded", working_copy(master, kinds, True))):
        folder = os.path.join(a.out, name)
        shutil.copytree(a.tokenizer, folder, dirs_exist_ok=True)
        model.save(shape, weights, folder)
    print(f"{step} steps, {step * a.rows * generate.ROW / 1e6:.0f} M tokens, {seconds:.0f} s; most used expert by layer "
          + " ".join(f"{x:.3f}" for x in skew[:, 0].tolist()) + "; least " + " ".join(f"{x:.4f}" for x in skew[:, -1].tolist()), flush=True)


if __name__ == "__main__":
    main()
