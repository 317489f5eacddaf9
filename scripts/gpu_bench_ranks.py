"""The run of scripts/gpu-bench --gpus N: Llama-3-8B, every parameter trained, on N GPUs of one machine.

Speed of ZeRO 1 and 3 at a few batch sizes with and without the optimizer's state in host memory, against the same GPUs
each alone; planned and measured bytes of every rank; the largest batch in a limit of memory, and the time that a
training set takes with it. PyTorch's FSDP2 runs in the same call where its script is given.
"""
import concurrent.futures
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
# Of the time, what is kept for the peer, if there is one.
PEER_SECONDS = 130


class Bench:
    def __init__(self, args):
        self.args, self.rows, self.left = args, [], []
        self.until = time.monotonic() + args.seconds

    def command(self, verb, batch, gpus, zero, offload, recompute):
        between = ["--collectives", self.args.collectives] if gpus > 1 else []
        return [self.args.binary, verb, "--model", self.args.model, "--batch", str(batch), "--seq",
                str(self.args.sequence), "--optimizer-dtype", "bf16", "--gpus", str(gpus), "--zero", str(zero), "--offload",
                offload, "--recompute", recompute, *between]

    def remaining(self):
        """Seconds left for what is not the peer."""
        return self.until - time.monotonic() - (PEER_SECONDS if self.args.peer_ranks else 0)

    def run(self, name, command, iterations, environments):
        """The rows of a command that runs once in each environment, all at the same time; none where time is up or
        a run failed, which is said."""
        if self.remaining() <= 0:
            self.left.append(f"{name}: time was up")
            return []
        command = [*command, "--device", self.args.device, "--full-rows", "--warmup", "1", "--iterations", str(iterations)]
        began = time.monotonic()
        started = [subprocess.Popen(command, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                    text=True) for more in environments]
        rows, failed = [], None
        for process in started:
            try:
                out, err = process.communicate(timeout=max(1, self.remaining() + 30))
                if process.returncode == 0:
                    rows.append(json.loads(out))
                else:
                    failed = "".join(err.strip().splitlines()[:1])
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                failed = "stopped, as time was up"
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if failed is not None:
            self.left.append(f"{name}: {failed[:160]}")
            return []
        return rows

    def keep(self, name, row, batch, **more):
        """Adds a row with what it is, a figure for each rank."""
        for what in ("planned", "measured"):
            row[what] = row.get(f"rank_{what}_bytes") or [row[f"{what}_bytes"]]
        row["seconds"] = row.get("rank_seconds") or [row["seconds_per_iteration"]]
        row.update(name=name, batch=batch, **more)
        # As a sweep's points, for `plimsoll report`.
        point = {what: row[what] for what in ("batch", "gpus", "zero", "offload", "recompute")}
        with open(os.path.join(self.args.out, "points.jsonl"), "a") as log:
            log.write(json.dumps({"point": point, "status": "ok", **row}) + "\n")
        self.rows.append(row)
        return row

    def alone(self, batch):
        """Every GPU by itself, all at once: one row, with the figures of the slowest as its own."""
        name, gpus = f"{batch}, alone", self.args.gpus
        environments = [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(gpus)] if self.args.device == "cuda" else [{}]
        rows = self.run(name, self.command("point", batch, 1, 0, "none", "norms"), self.args.iterations, environments)
        if not rows:
            return None
        slowest = max(rows, key=lambda row: row["seconds_per_iteration"])
        lists = {f"rank_{key}": [row[key] for row in rows] for key in ("planned_bytes", "measured_bytes")}
        lists["rank_seconds"] = [row["seconds_per_iteration"] for row in rows]
        return self.keep(name, {**slowest, **lists}, batch, gpus=1, zero=0, offload="none", recompute="norms")

    def point(self, name, batch, zero, offload="none", recompute="norms", iterations=None, limit=None, **more):
        command = self.command("point", batch, self.args.gpus, zero, offload, recompute)
        if limit:
            command += ["--memory-limit", limit]
        if offload != "none" and self.args.device == "cuda":
            # Where memory grows with its use, its size now says little.
            command += ["--host-memory", self.args.host_memory]
        rows = self.run(name, command, iterations or self.args.iterations, [{}])
        if not rows:
            return None
        return self.keep(name, rows[0], batch, gpus=self.args.gpus, zero=zero, offload=offload, recompute=recompute, **more)

    def largest(self, zero, offload, recompute):
        """The largest batch a GPU that the plan finds room for in the limit; 0: not one."""
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


def spread(values, unit=1e9, digits=2):
    figures = (min(values) / unit, sum(values) / len(values) / unit, max(values) / unit)
    return " / ".join(f"{x:.{digits}f}" for x in figures)


def worst(row):
    return max(abs(m / p - 1) for p, m in zip(row["planned"], row["measured"]))


def speed_table(b, alone):
    lines = [f"| batch a GPU, ZeRO, offload | tokens/s/GPU | of the slowest alone | planned s | s: min / mean / max of {b.args.gpus} "
             "| GB planned: min / mean / max | GB measured | worst % |", "|---|---|---|---|---|---|---|---|"]
    for row in b.rows:
        if row.get("largest"):
            continue
        rate = row["tokens_per_second"] / row["gpus"]
        one = alone.get(row["batch"])
        ratio = f"{rate / one:.3f}" if one and row["gpus"] > 1 else ""
        lines.append(f"| {row['name']} | {rate:,.0f} | {ratio} | {row['planned_seconds']:.3f} | {spread(row['seconds'], 1, 3)} "
                     f"| {spread(row['planned'])} | {spread(row['measured'])} | {100 * worst(row):.2f} |")
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
        b.left.append("rows of FSDP2 after those above: stopped, as time was up")
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
    # Planned by a core or two, while points run.
    pool = concurrent.futures.ThreadPoolExecutor(2)
    ways = [(offload, recompute) for recompute in ("block", "mlp", "none") for offload in OFFLOADS]
    largest = {way: pool.submit(b.largest, 3, *way) for way in ways if args.only in "largest"}
    # The rows that say most come first: what is left when time is up, is said.
    for batch in reversed(BATCHES) if args.only in "speed" else ():
        row = b.alone(batch)
        if row:
            alone[batch] = row["tokens_per_second"]
        for zero in STAGES:
            b.point(f"{batch}, {zero}, none", batch, zero)
    for batch in reversed(BATCHES) if args.only in "speed" else ():
        for zero in STAGES:
            b.point(f"{batch}, {zero}, optimizer", batch, zero, "optimizer")
    for (offload, recompute), found in largest.items():
        batch = found.result()
        if batch == 0:
            b.left.append(f"no batch fits {args.limit} with offload {offload}, recompute {recompute}")
            continue
        # Steps of many rows are long, and alike.
        name = f"largest: {offload}, {recompute}"
        b.point(name, batch, 3, offload, recompute, iterations=1, limit=args.limit, largest=True)
    text = "\n".join([*speed_table(b, alone), "", *largest_table(b), "", *fsdp_table(b),
                      *(f"\nnot run: {what}" for what in b.left)])
    with open(os.path.join(args.out, f"gpu-bench-{args.gpus}.md"), "w") as f:
        f.write(text + "\n")
    print(text)
    if not b.rows:
        return 1
    report = [args.binary, "report", args.out, "--samples", str(SAMPLES), "--title", f"{args.model} on {args.gpus} GPUs",
              "--out", os.path.join(args.out, f"gpu-bench-{args.gpus}.html")]
    return subprocess.run(report, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
