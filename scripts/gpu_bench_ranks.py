"""The run of scripts/gpu-bench --gpus N: Llama-3-8B, every parameter trained, on N GPUs of one machine.

Speed of ZeRO 1 and 3 at a few batch sizes with and without the optimizer's state in host memory, against one GPU;
planned and measured bytes of every rank; the largest batch in a limit of memory, and the time that a training set
takes with it. PyTorch's FSDP2 runs in the same call where its script is given.
"""
import json
import os
import subprocess
import sys
import time

SAMPLES = 19_692
# What others published for that many samples on eight A100-80 (HF Trainer, DeepSpeed ZeRO 3): the largest batch a
# GPU, and minutes.
PUBLISHED = {"none": "2, 29 min (3 with Liger)", "optimizer": "17 (41 with Liger)"}
BATCHES = (1, 2, 4)
STAGES = (1, 3)
OFFLOADS = ("none", "optimizer")


class Bench:
    def __init__(self, args):
        self.args, self.rows, self.left = args, [], []
        self.until = time.monotonic() + args.seconds

    def command(self, verb, batch, gpus, zero, offload, recompute):
        return [self.args.binary, verb, "--model", self.args.model, "--batch", str(batch), "--seq",
                str(self.args.sequence), "--optimizer-dtype", "bf16", "--gpus", str(gpus), "--zero", str(zero), "--offload",
                offload, "--recompute", recompute, "--collectives", self.args.collectives]

    def point(self, name, batch, gpus, zero, offload="none", recompute="norms", more=()):
        """A measured row; none where time is up or the run failed, which is said."""
        if time.monotonic() > self.until:
            self.left.append(name)
            return None
        command = [*self.command("point", batch, gpus, zero, offload, recompute), "--device", self.args.device,
                   "--full-rows", "--warmup", "2", "--iterations", str(self.args.iterations), *more]
        if offload != "none" and self.args.device == "cuda":
            # Where memory grows with its use, its size now says little.
            command += ["--host-memory", self.args.host_memory]
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            row = json.loads(done.stdout) if done.returncode == 0 else None
            said = done.stderr.strip().splitlines()[:1]
        except subprocess.TimeoutExpired:
            row, said = None, ["no end within 240 s"]
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if row is None:
            self.left.append(f"{name}: {''.join(said)[:160]}")
            return None
        row.update(name=name, gpus=gpus, zero=zero, offload=offload, batch=batch, recompute=recompute)
        row["planned"] = row.get("rank_planned_bytes") or [row["planned_bytes"]]
        row["measured"] = row.get("rank_measured_bytes") or [row["measured_bytes"]]
        with open(os.path.join(self.args.out, f"gpu-bench-{self.args.gpus}.jsonl"), "a") as log:
            log.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row

    def largest(self, zero, offload, recompute):
        """The largest batch a GPU that the plan finds room for in the limit."""
        def fits(batch):
            # Planned for the GPU that has the limit's memory; the profile does not change bytes.
            command = [*self.command("plan", batch, self.args.gpus, zero, offload, recompute), "--gpu", self.args.plan_for,
                       "--memory", self.args.limit, "--format", "json"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            except subprocess.TimeoutExpired:
                self.left.append(f"no plan of batch {batch} within 60 s: offload {offload}, recompute {recompute}")
                return False
            return done.returncode == 0 and json.loads(done.stdout)["fits"]
        low, high = 0, 1
        while high <= 1024 and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def spread(values, unit=1e9):
    low, mean, high = min(values) / unit, sum(values) / len(values) / unit, max(values) / unit
    return f"{low:.2f} / {mean:.2f} / {high:.2f}"


def worst(row):
    return max(abs(m / p - 1) for p, m in zip(row["planned"], row["measured"]))


def speed_table(b, alone):
    n = b.args.gpus
    lines = [f"| batch a GPU, ZeRO, offload | tokens/s/GPU | of one GPU | planned / measured s | GB planned: min / mean / max "
             f"of {n} | GB measured | worst % |", "|---|---|---|---|---|---|---|"]
    for row in b.rows:
        if row.get("largest"):
            continue
        rate = row["tokens_per_second"] / row["gpus"]
        one = alone.get(row["batch"])
        ratio = f"{rate / one:.3f}" if one and row["gpus"] > 1 else ""
        lines.append(f"| {row['name']} | {rate:,.0f} | {ratio} | {row['planned_seconds']:.3f} / "
                     f"{row['seconds_per_iteration']:.3f} | {spread(row['planned'])} | {spread(row['measured'])} "
                     f"| {100 * worst(row):.2f} |")
    return lines


def largest_table(b):
    lines = [f"| in {b.args.limit} a GPU: offload, recompute | batch a GPU | published | GB measured | s a step | minutes for "
             f"{SAMPLES:,} samples |", "|---|---|---|---|---|---|"]
    for row in b.rows:
        if not row.get("largest"):
            continue
        steps = -(-SAMPLES // (row["batch"] * row["gpus"]))
        lines.append(f"| {row['offload']}, {row['recompute']} | {row['batch']} | {PUBLISHED[row['offload']]} "
                     f"| {spread(row['measured'])} | {row['seconds_per_iteration']:.3f} "
                     f"| {steps * row['seconds_per_iteration'] / 60:.1f} |")
    return lines


def fsdp_table(b):
    """Rows of PyTorch's FSDP2, one JSON object a line; what there is when its time is up."""
    rest = b.until - time.monotonic()
    if not b.args.peer_ranks or rest < 30:
        return []
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(b.args.gpus), b.args.peer_ranks,
               b.args.out]
    env = dict(os.environ, PYTHONPATH=b.args.peer_path or "")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
                               start_new_session=True)
    try:
        out, _ = process.communicate(timeout=rest)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, _ = process.communicate()
    lines = ["| FSDP2: batch, checkpointing, offload, reshard | tokens/s/GPU | GB allocated | GB reserved |", "|---|---|---|---|"]
    for row in (json.loads(line) for line in out.splitlines() if line.startswith("{")):
        what = f"{row.get('bs')}, {row.get('ckpt')}, {row.get('offload')}, {row.get('reshard')}"
        if "tok_s_gpu" in row:
            lines.append(f"| {what} | {row['tok_s_gpu']:,.0f} | {row['peak_allocated'] / 1e9:.1f} "
                         f"| {row['peak_reserved'] / 1e9:.1f} |")
        else:
            lines.append(f"| {what} | {'out of memory' if row.get('oom') else row.get('error', '')[:60]} | | |")
    return lines


def run(args):
    os.makedirs(args.out, exist_ok=True)
    b = Bench(args)
    alone = {}
    for batch in BATCHES:
        row = b.point(f"{batch}, one GPU", batch, 1, 0)
        if row:
            alone[batch] = row["tokens_per_second"]
    # The rows that say most come first: what is left when time is up, is said.
    for offload in OFFLOADS:
        for batch in reversed(BATCHES):
            for zero in STAGES:
                b.point(f"{batch}, {zero}, {offload}", batch, args.gpus, zero, offload)
    for offload in OFFLOADS:
        for recompute in ("none", "mlp", "block"):
            batch = b.largest(3, offload, recompute)
            if batch == 0:
                b.left.append(f"no batch fits {args.limit} with offload {offload}, recompute {recompute}")
                continue
            row = b.point(f"largest: {offload}, {recompute}", batch, args.gpus, 3, offload, recompute,
                          ["--memory-limit", args.limit])
            if row:
                row["largest"] = True
    text = "\n".join([*speed_table(b, alone), "", *largest_table(b), "", *fsdp_table(b),
                      *(f"\nnot run: {what}" for what in b.left)])
    with open(os.path.join(args.out, f"gpu-bench-{args.gpus}.md"), "w") as f:
        f.write(text + "\n")
    print(text)
    return 0 if b.rows else 1
