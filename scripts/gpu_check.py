"""The run of scripts/gpu-check: every check in turn or side by side, a log, and a table.

Each check runs whatever became of the others, ends in time, and says in one line what it
saw. What measures memory or time has the GPU to itself; the others share it.
"""
import concurrent.futures
import glob
import hashlib
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

# The whole run ends before a transport's limit of ten minutes, table included.
DEADLINE = time.monotonic() + 540
# Of losses, relative. Float32 differs in the order of its sums alone: 1e-7 over 50 steps on the CPU where
# that order is changed. Bf16 rounds weights stochastically: on the CPU its curve stays within 0.21 % of
# float32 on stories260K (50 steps at 1e-4 and 5e-4) and within 0.19 % on SmolLM2-135M (20 steps at 2e-5).
EXACT_CURVE = 1e-4
ROUNDED_CURVE = 1e-2
# Planned bytes against the driver's.
MEMORY = 0.01


class Failed(Exception):
    """A check that does not hold, in the words of the table."""


class Skipped(Exception):
    """A check that this machine cannot make, and why."""


class Log:
    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8", errors="replace")
        self.lock = threading.Lock()

    def write(self, text):
        with self.lock:
            self.file.write(text.rstrip("\n") + "\n")
            self.file.flush()


class Bench:
    """Where everything lies, and how programs are run."""

    def __init__(self, source, work, log):
        self.source, self.work, self.log = source, work, log
        self.plimsoll = os.path.join(work, "plimsoll")
        self.gpu_check = os.path.join(work, "gpu_check")
        self.fixtures = os.path.join(work, ".gpu")
        self.data = os.path.join(self.fixtures, "data", "text.jsonl")
        self.cores = os.cpu_count() or 1
        self.memory = 0

    def environment(self, lane, extra=None):
        # Choices of algorithms are kept on disk: a cache of its own for all that must not wait for,
        # or mix with, what runs beside it.
        env = {k: v for k, v in os.environ.items() if not k.startswith("PLIMSOLL_")}
        env["XDG_CACHE_HOME"] = os.path.join(self.work, "cache", lane)
        env.update(extra or {})
        return {name: value for name, value in env.items() if value is not None}

    def start(self, command, lane, extra=None):
        # Files, not pipes: what a stopped program leaves running would hold a pipe open.
        out, err = (tempfile.TemporaryFile("w+", errors="replace", dir=self.work) for _ in range(2))
        process = subprocess.Popen(command, cwd=self.work, env=self.environment(lane, extra),
                                   stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        process.out, process.err = out, err
        return process

    def finish(self, process, command, timeout, began):
        """Waits for a process of `start`; its standard output, error and status."""
        timeout = max(0.1, min(timeout, DEADLINE - time.monotonic()))
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
            # A sweep ends its point, too.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        texts = []
        for file in (process.out, process.err):
            file.seek(0)
            texts.append(file.read())
            file.close()
        out, err = texts
        words = " ".join(os.path.basename(c) if c in (self.plimsoll, self.gpu_check) else c for c in command)
        self.log.write(f"\n$ {words}\n[status {process.returncode}, {time.monotonic() - began:.1f} s]\n{out}{err}")
        if late:
            raise Failed(f"no end after {timeout:.0f} s: {words[:80]}")
        return out, err, process.returncode

    def run(self, command, lane, timeout, extra=None, expect=(0,)):
        if DEADLINE - time.monotonic() < 5:
            raise Failed("no time was left for it")
        began = time.monotonic()
        out, err, status = self.finish(self.start(command, lane, extra), command, timeout, began)
        if expect is not None and status not in expect:
            raise Failed(f"status {status}: {last_line(err) or last_line(out)}")
        return out, err, status

    def json(self, arguments, lane, timeout, extra=None, expect=(0,)):
        out, _, _ = self.run([self.plimsoll, *arguments, "--format", "json"], lane, timeout, extra, expect)
        try:
            return json.loads(out)
        except ValueError:
            raise Failed(f"no JSON object but {out[-80:]!r}") from None

    def model(self, name):
        path = os.path.join(self.fixtures, "models", name)
        if not os.path.exists(path):
            raise Skipped(f"{name} is not among the fixtures")
        return path

    def folder(self, name):
        path = os.path.join(self.work, "out", name)
        os.makedirs(path, exist_ok=True)
        return path


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("note: run with")]
    errors = [line for line in lines if line.startswith("error")]
    return (errors or lines or [""])[-1][:200]


# Ops, steps and numbers: the example gpu_check of crates/cuda.

def parts(*names, extra=None, timeout=150):
    def check(b, lane):
        out, err, status = b.run([b.gpu_check, *names], lane, timeout, extra, expect=None)
        counts = re.search(r"^(\d+) checks, (\d+) failures", out, re.M)
        if status == 0 and counts and int(counts[1]) > 0:
            return f"{counts[1]} comparisons{numbers(out)}"
        failures = re.findall(r"^FAILED (.*)$", out, re.M)
        if counts and failures:
            raise Failed(f"{counts[2]} of {counts[1]} fail, first: {failures[0]}")
        raise Failed(f"status {status}: {last_line(err) or last_line(out)}")
    return check


def numbers(out):
    """The largest errors of gradients that the golden and the real models showed."""
    said = ""
    for kind in ("f32", "bf16"):
        errors = re.findall(rf" {kind} logits, gradients ([-+.e\d]+)", out)
        if errors:
            said += f"; {kind} gradients up to {max(map(float, errors)):.1e}"
    ratios = re.findall(r"ratio ([.\d]+)$", out, re.M)
    return said + (f", {max(map(float, ratios)):.2f} of the CPU's bf16" if ratios else "")


# The program: exactness.

def contents(folder, step):
    """What a run left behind: hashes of every tensor and state, and the losses."""
    found = {}
    for name in [f"checkpoint-{step:08d}", "best", "."]:
        for path in sorted(glob.glob(os.path.join(folder, name, "*"))):
            if path.endswith((".safetensors", "trainer.json", "config.json")):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, folder)] = hashlib.sha256(file.read()).hexdigest()
    found["losses"] = curve(folder, ("step", "loss", "grad_norm"))
    return found


def curve(folder, keys=("loss",)):
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if "loss" in row]
    return [tuple(row.get(key) for key in keys) if len(keys) > 1 else row[keys[0]] for row in rows]


def same(a, b, what):
    if sorted(a) != sorted(b):
        raise Failed(f"{what}: files {sorted(set(a) ^ set(b))} are on one side only")
    differing = [name for name in a if a[name] != b[name]]
    if differing:
        raise Failed(f"{what}: {', '.join(differing)[:120]} differ")


def bitwise(b, lane, model, name, steps=300):
    options = ["train", "--device", "cuda", "--model", model, "--data", b.data, "--precision", "bf16", "--batch", "4",
               "--seq", "256", "--accumulate", "2", "--steps", str(steps), "--save-every", str(steps // 2),
               "--keep", "9", "--lr", "1e-4", "--seed", "7", "--validation-split", "0.1",
               "--eval-every", str(steps // 2)]
    out = {key: os.path.join(b.folder(name), key) for key in ("first", "second", "interrupted", "killed")}
    b.json([*options, "--out", out["first"]], lane, 90)
    whole = contents(out["first"], steps)
    if f"checkpoint-{steps:08d}/optimizer.safetensors" not in whole:
        raise Failed(f"no checkpoint of step {steps}")
    b.json([*options, "--out", out["second"]], lane, 90)
    same(whole, contents(out["second"], steps), "two runs")

    # Ctrl-C in the middle, then on.
    command = [b.plimsoll, *options, "--out", out["interrupted"], "--format", "json"]
    began = time.monotonic()
    process = b.start(command, lane)
    metrics = os.path.join(out["interrupted"], "metrics.jsonl")
    while process.poll() is None and time.monotonic() - began < 60:
        if os.path.exists(metrics) and lines(metrics) >= steps // 3:
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.002)
    text, err, status = b.finish(process, command, 60, began)
    try:
        ended = json.loads(text)
    except ValueError:
        raise Failed(f"Ctrl-C: status {status}, {last_line(err)}") from None
    b.json([*options, "--out", out["interrupted"], "--resume"], lane, 90)
    same(whole, contents(out["interrupted"], steps), f"interrupted at step {ended.get('steps')} and resumed")

    # What is left of a run that was killed after its first checkpoint.
    middle = f"checkpoint-{steps // 2:08d}"
    for folder in (middle, "best"):
        if os.path.exists(os.path.join(out["first"], folder)):
            shutil.copytree(os.path.join(out["first"], folder), os.path.join(out["killed"], folder))
    shutil.copy(os.path.join(out["first"], "metrics.jsonl"), out["killed"])
    b.json([*options, "--out", out["killed"], "--resume"], lane, 90)
    same(whole, contents(out["killed"], steps), "killed half-way and resumed")
    shutil.rmtree(b.folder(name))
    middle = "" if ended.get("ended") == "interrupted" else ", but it ended before the signal"
    return f"{steps} steps twice; interrupted at {ended.get('steps')}{middle}; resumed twice: same bits"


def lines(path):
    with open(path, "rb") as file:
        return file.read().count(b"\n")


def bitwise_stories(b, lane):
    return bitwise(b, lane, b.model("stories260K-hf"), "bitwise-stories")


def bitwise_preset(b, lane):
    # Head size 64: the tensor-core kernels of attention.
    path = os.path.join(b.fixtures, "golden", "llama-mini")
    if not os.path.exists(path):
        path = "plimsoll-tiny"
    return bitwise(b, lane, path, "bitwise-preset")


def greedy(b, lane):
    options = ["generate", "--model", b.model("stories260K-hf"), "--prompt", "Once upon a time", "--greedy",
               "--ignore-eos", "--max-new-tokens", "200", "--precision", "f32"]
    cpu = b.json([*options, "--device", "cpu"], lane, 60, {"PLIMSOLL_THREADS": "2"})["ids"]
    cuda = b.json([*options, "--device", "cuda"], lane, 60)["ids"]
    if cpu != cuda:
        at = next((i for i, pair in enumerate(zip(cpu, cuda)) if pair[0] != pair[1]), min(len(cpu), len(cuda)))
        raise Failed(f"the ids differ from place {at} of {len(cpu)} on")
    return f"{len(cpu)} ids equal"


# The program: files in four bits.

def quantized_files(b, lane):
    """What `quantize` writes: the same bytes whoever quantizes."""
    said, folder = [], b.folder("quantized")
    for name in ("stories260K-hf", "smollm2-135m.gguf"):
        if not os.path.exists(os.path.join(b.fixtures, "models", name)):
            continue
        for quant in ("nf4", "nf4-dq", "fp4", "fp4-dq"):
            seconds, digests = {}, {}
            for device in ("cpu", "cuda"):
                out = os.path.join(folder, device)
                row = b.json(["quantize", "--model", b.model(name), "--quant", quant, "--device", device, "--out", out],
                             lane, 90)
                seconds[device] = row["seconds"]
                with open(os.path.join(out, "model.safetensors"), "rb") as file:
                    digests[device] = hashlib.sha256(file.read()).hexdigest()
            if digests["cpu"] != digests["cuda"]:
                raise Failed(f"{name} in {quant}: the files differ")
        said.append(f"{name} in 4 formats, {quant} in {seconds['cpu']:.2f} s on the CPU, {seconds['cuda']:.2f} s")
    shutil.rmtree(folder)
    if not said:
        raise Skipped("no model is among the fixtures")
    return "; ".join(said)


# The program: loss curves.

def losses(b, lane, model, name, device, precision, steps, options):
    out = os.path.join(b.folder("curves"), f"{name}-{device}-{precision}")
    command = ["train", "--model", model, "--data", b.data, "--device", device, "--precision", precision,
               "--steps", str(steps), "--schedule", "constant", "--warmup", "0", "--save-every", "1000000",
               "--seq", "256", "--out", out, *options]
    threads = {"PLIMSOLL_THREADS": str(max(1, min(8, b.cores // 2)))}
    b.json(command, lane, 120, threads)
    found = curve(out)
    shutil.rmtree(out)
    if len(found) != steps:
        raise Failed(f"{name} {device} {precision}: {len(found)} losses of {steps} steps")
    return found


def deviation(found, reference, limit, what):
    worst = max(abs(a / r - 1) for a, r in zip(found, reference))
    if not worst <= limit:
        raise Failed(f"{what}: {worst:.2e} above {limit:.0e}")
    return f"{what} {worst:.1e}"


def curves_stories(b, lane):
    model, options = b.model("stories260K-hf"), ["--batch", "8", "--lr", "5e-4"]
    cpu = losses(b, lane, model, "stories", "cpu", "f32", 50, options)
    exact = losses(b, lane, model, "stories", "cuda", "f32", 50, options)
    rounded = losses(b, lane, model, "stories", "cuda", "bf16", 50, options)
    said = [deviation(exact, cpu, EXACT_CURVE, "f32"), deviation(rounded, cpu, ROUNDED_CURVE, "bf16")]
    return f"50 steps, loss {cpu[0]:.3f} to {cpu[-1]:.3f}; from the CPU's f32: {', '.join(said)}"


def curves_smollm2(b, lane):
    model, options = b.model("smollm2-135m.gguf"), ["--batch", "4", "--lr", "2e-5"]
    exact = losses(b, lane, model, "smollm2", "cuda", "f32", 50, options)
    rounded = losses(b, lane, model, "smollm2", "cuda", "bf16", 50, options)
    cpu = losses(b, lane, model, "smollm2", "cpu", "f32", 3, options)
    said = [deviation(exact[:3], cpu, EXACT_CURVE, "first 3 steps f32 from the CPU"),
            deviation(rounded, exact, ROUNDED_CURVE, "bf16 from f32")]
    return f"50 steps, loss {exact[0]:.3f} to {exact[-1]:.3f}; {', '.join(said)}"


# The program: memory.

def gib(count):
    return f"{count / 2**30:.2f} GiB"


def points(b, lane, out, arguments, timeout=150):
    arguments = ["sweep", "--device", "cuda", *arguments, "--out", os.path.join(b.folder(out), "points")]
    return b.json(arguments, lane, timeout)["points"]


def agree(rows):
    """The worst difference between planned and measured bytes of the points that ran."""
    worst = 0.0
    for row in (row for row in rows if row["status"] == "ok"):
        worst = max(worst, abs(row["measured_bytes"] / row["planned_bytes"] - 1))
        if worst > MEMORY:
            raise Failed(f"{row['point']}: {row['measured_bytes']} bytes measured, {row['planned_bytes']} planned")
    return f"planned and measured within {100 * worst:.2f} %"


def statuses(rows):
    return " ".join(f"{'x'.join(str(v) for v in row['point'].values())}:{row['status']}" for row in rows)


def sweep(b, lane):
    """A sweep into a limit, and the exact line: a byte less is refused."""
    recipe = ["--model", "smollm2-135m", "--seq", "2048", "--iterations", "3", "--warmup", "1"]
    rows = points(b, lane, "sweep", [*recipe, "--vary", "batch=1..", "--memory-limit", "5GiB"])
    found = [row["status"] for row in rows]
    if found[-1:] != ["refused"] or len(found) < 3 or set(found[:-1]) != {"ok"}:
        raise Failed(f"expected some ok and one refused, found {statuses(rows)}")
    needed = rows[0]["planned_bytes"]
    for limit, expected in ((needed, "ok"), (needed - 1, "refused")):
        at = points(b, lane, f"line-{expected}", [*recipe, "--vary", "batch=1", "--memory-limit", str(limit)])
        if [row["status"] for row in at] != [expected]:
            raise Failed(f"a limit of {limit} bytes for {needed} planned: {statuses(at)}, not {expected}")
    return f"{statuses(rows)}; a byte below the plan is refused; {agree(rows)}"


def largest_batch(b, lane, model, seq, memory):
    def fits(batch):
        out, _, _ = b.run([b.plimsoll, "plan", "--model", model, "--batch", str(batch), "--seq", str(seq), "--gpu",
                           "h200", "--memory", str(memory), "--format", "json"], lane, 30, expect=(0, 3))
        return json.loads(out)["fits"]
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > 1 << 20:
            raise Failed(f"{model} fits at batch {high} in {gib(memory)}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def used_by_others(b):
    """Bytes of the first GPU in use before anything of ours runs, where nvidia-smi tells."""
    try:
        out = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"],
                             capture_output=True, text=True, timeout=30, check=True).stdout
        return int(out.strip()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def end_of_memory(b, lane):
    """The largest batch that the plan says fits runs; one more is refused."""
    # Short sequences: a batch more is a small part of the memory, so the last point is close to the line.
    seq, memory, limit = 256, b.memory, []
    others = used_by_others(b)
    if others > 1 << 30:
        memory -= others
        limit = ["--memory-limit", str(memory)]
    for model in ("tinyllama-1.1b", "qwen1.5-0.5b", "smollm2-135m"):
        last = largest_batch(b, lane, model, seq, memory)
        if last >= 4:
            break
    else:
        raise Skipped(f"{gib(memory)} is too little for any of the models")
    batches = [last // 4, last // 2, last, last + 1]
    recipe = ["--model", model, "--seq", str(seq), "--full-rows", *limit]
    vary = "batch=" + ",".join(map(str, batches))
    rows = points(b, lane, "end", [*recipe, "--vary", vary, "--iterations", "2", "--warmup", "1"], 240)
    if [row["status"] for row in rows] != ["ok", "ok", "ok", "refused"]:
        message = next((row.get("message", "") for row in rows if row["status"] != "ok"), "")
        raise Failed(f"{model}: {statuses(rows)} of {gib(memory)}; {message[:80]}")
    out = os.path.join(b.folder("refused"), "run")
    _, err, _ = b.run([b.plimsoll, "train", "--device", "cuda", "--model", model, "--seq", str(seq), *limit, "--batch",
                       str(last + 1), "--out", out], lane, 60, expect=(3,))
    if "needs" not in err or "fits batch" not in err:
        raise Failed(f"train refuses without saying what to change: {last_line(err)}")
    used = rows[2]["planned_bytes"] / memory
    return (f"{model} {statuses(rows)}, the last that runs takes {gib(rows[2]['measured_bytes'])} "
            f"({100 * used:.1f} % of memory); train: status 3; {agree(rows)}")


def benchmark(b, lane):
    row = b.json(["bench", "--no-ops", "--device", "cuda", "--model", "qwen1.5-0.5b", "--batch", "4", "--seq", "2048",
                  "--optimizer-dtype", "bf16", "--iterations", "8", "--warmup", "3"], lane, 120)
    agree([dict(row, status="ok", point="bench")])
    planned = row["planned_seconds"] / row["seconds_per_iteration"] - 1
    return (f"qwen1.5-0.5b 4 x 2048: {row['tokens_per_second']:.0f} tokens/s, {1e3 * row['seconds_per_iteration']:.1f}"
            f" ms (planned {100 * planned:+.0f} %), {gib(row['measured_bytes'])}")


INSIDE = ["--optimizer-in-backward", "--max-grad-norm", "0", "--optimizer-dtype", "bf16"]


def offload_point(b, lane, model, batch, options, timeout, iterations=5):
    """A point with its two memories held against the plan: the driver's figure and the kernel's.

    Updates are on the GPU unless the options say otherwise."""
    if "--offload" in options and options[options.index("--offload") + 1].startswith("optimizer"):
        options = [*options, *([] if "--update-on" in options else ["--update-on", "gpu"])]
    row = b.json(["point", "--device", "cuda", "--model", model, "--batch", str(batch), "--seq", "2048", "--full-rows",
                  "--iterations", str(iterations), "--warmup", "2", "--host-memory", "120GiB", *options],
                 lane, timeout)
    agree([dict(row, status="ok", point=" ".join(options))])
    planned, measured = row["host_bytes"], row["measured_host_bytes"]
    if abs(measured - planned) > max(0.01 * planned, 4 << 20):
        raise Failed(f"{model} {options}: {measured} bytes of host memory measured, {planned} planned")
    return row


def figures(row):
    planned = row["planned_seconds"] / row["seconds_per_iteration"] - 1
    return (f"{row['seconds_per_iteration']:.3f} s (planned {100 * planned:+.0f} %), {row['tokens_per_second']:.0f}"
            f" tokens/s, {row['measured_bytes'] / 1e9:.2f} + {row['measured_host_bytes'] / 1e9:.2f} GB")


def offload_memory(b, lane):
    rows = {}
    for offload in ("none", "optimizer", "optimizer+weights", "optimizer+activations"):
        rows[offload] = offload_point(b, lane, "qwen1.5-0.5b", 2, [*INSIDE, "--offload", offload, "--recompute", "block"], 90)
    losses = {row["loss"] for row in rows.values()}
    if len(losses) > 1:
        raise Failed(f"losses after 7 steps differ: {losses}")
    return "; ".join(f"{name} {figures(row)}" for name, row in rows.items())


ACTIVATIONS = {  # method and optimizer, recompute, offload
    "QLoRA": (["--method", "qlora", "--optimizer-dtype", "f32", "--max-grad-norm", "0"],
              "norms:0-27/5,norms:28-31,mlp", "activations:0-27"),
    "LoRA": (["--method", "lora", "--optimizer-dtype", "f32", "--max-grad-norm", "0"],
             "norms:0-27/5,norms:28-31,mlp", "activations:0-27"),
    "full, 8-bit state": (["--optimizer", "adamw8bit", "--optimizer-in-backward", "--max-grad-norm", "0"],
                          "norms:0-27/5,norms:28-31,mlp", "activations:0-27"),
}


def activations_8b(name):
    method, recompute, offload = ACTIVATIONS[name]
    def check(b, lane):
        return figures(offload_point(b, lane, "llama-3-8b", 4, [*method, "--recompute", recompute, "--offload", offload], 240, 6))
    return check


def offload_8b(batch, offload, *options):
    def check(b, lane):
        row = offload_point(b, lane, "llama-3-8b", batch, [*INSIDE, "--offload", offload, *options], 240, 6)
        return figures(row)
    return check


# The program: what is missing is said.

POINT = ["point", "--device", "cuda", "--model", "plimsoll-tiny", "--batch", "1", "--seq", "64", "--iterations", "1"]


def said(status, err, words):
    if status != 2:
        raise Failed(f"status {status}, not 2: {last_line(err)}")
    absent = [word for word in words if word not in err]
    if absent or "panicked" in err:
        raise Failed(f"the message lacks {absent}: {last_line(err)}")
    return f"status 2: {last_line(err)}"


def no_gpu(b, lane):
    _, err, status = b.run([b.plimsoll, *POINT], lane, 60, {"CUDA_VISIBLE_DEVICES": ""}, expect=None)
    return said(status, err, ["CUDA_VISIBLE_DEVICES", "--device cpu"])


def copies(library):
    """Files of that library in every place where the program looks."""
    places = glob.glob("/usr/local/cuda*/lib64") + glob.glob("/usr/local/cuda*/targets/*/lib")
    for root in filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"))):
        places += [root + "/lib64", root + "/lib"] + glob.glob(root + "/lib/python3*/site-packages/nvidia/*/lib")
    python = shutil.which("python3") or sys.executable
    for path in (python, os.path.realpath(python)):
        root = os.path.dirname(os.path.dirname(path))
        places += [root + "/lib", root + "/targets/x86_64-linux/lib"]
        for kind in ("site", "dist"):
            for lib in ("lib", "lib64", "local/lib"):
                places += glob.glob(f"{root}/{lib}/python3*/{kind}-packages/nvidia/*/lib")
    places += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    found = {os.path.realpath(path) for place in places if place for path in glob.glob(f"{place}/{library}.so*")}
    for ldconfig in ("ldconfig", "/sbin/ldconfig"):
        try:
            out = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        found.update(os.path.realpath(path) for path in re.findall(rf"{library}\.so\S* .*=> (\S+)", out))
        break
    return sorted(path for path in found if os.path.isfile(path))


def of_driver():
    """Folders of LD_LIBRARY_PATH that the driver itself is in."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    return [folder for folder in folders if glob.glob(folder + "/libcuda.so*")]


# Lays an empty file over each of the first arguments, up to `--`, seen by this process alone.
HIDE = """while [ "$1" != -- ]; do mount --bind "$EMPTY" "$1" || exit 97; shift; done; shift; exec "$@" """


def missing(library, file, wheel, extra):
    def check(b, lane):
        command, words = [b.plimsoll, *POINT], [file, f"pip install {wheel}", "LD_LIBRARY_PATH"]
        # Without any Python or toolkit to look in. That suffices where the system itself has none.
        bare = dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"))
        bare.update(PATH="/nonexistent", LD_LIBRARY_PATH=":".join(of_driver()) or None)
        if library == "libcublasLt":
            _, err, status = b.run(command, lane, 60, {**extra, **bare}, expect=None)
            if status != 0:
                return said(status, err, words)
        files, unshare = copies(library), shutil.which("unshare")
        if not unshare or os.geteuid() != 0:
            raise Skipped(f"{library} cannot be hidden without root and unshare")
        empty = os.path.join(b.work, "empty")
        open(empty, "w", encoding="ascii").close()
        hide = [unshare, "-m", "sh", "-c", HIDE, "sh", *files, "--", *command]
        _, err, status = b.run(hide, lane, 60, {**extra, "EMPTY": empty}, expect=None)
        if status == 97 or "unshare" in last_line(err):
            raise Skipped(f"{library} cannot be hidden here: {last_line(err)}")
        if status == 0:
            raise Skipped(f"{library} was found beside {', '.join(files)[:80]}")
        return said(status, err, words)
    return check


# Ranks that share a GPU wait for each other there: each of their streams needs a queue of its own.
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

# Checks that share the GPU, in lanes that run side by side, longest first; then those that need it alone.
LANES = {
    "nvrtc": [("ops, compiled by NVRTC", parts("ops", extra={"PLIMSOLL_NVRTC": "1"}, timeout=200))],
    "golden": [("golden models, PyTorch's numbers", parts("golden")),
               ("real models: logits, gradients", parts("real"))],
    "program": [("bitwise: stories260K", bitwise_stories),
                ("bitwise: head size 64", bitwise_preset),
                ("loss curves: stories260K", curves_stories),
                ("greedy ids, CPU and CUDA", greedy)],
    "smollm2": [("loss curves: SmolLM2-135M", curves_smollm2)],
    "ops": [("ops", parts("ops"))],
    "quantize": [("quantize: the CPU's bits", parts("quantize")), ("quantize: files", quantized_files)],
    "ranks": [("collectives as copies", parts("ranks", extra=QUEUES))],
    "steps": [("steps, prefill, decoding", parts("train", "infer"))],
    "offload": [("offload: same bits", parts("offload", timeout=300))],
    "attention": [("attention, portable kernels", parts("attention", extra={"PLIMSOLL_ATTENTION": "portable"})),
                  ("attention, simple kernels", parts("attention", extra={"PLIMSOLL_ATTENTION": "simple"}))],
    "missing": [("no GPU visible", no_gpu),
                ("cuBLASLt missing", missing("libcublasLt", "libcublasLt.so.13", "nvidia-cublas", {})),
                ("NVRTC missing", missing("libnvrtc", "libnvrtc.so.13", "nvidia-cuda-nvrtc", {"PLIMSOLL_NVRTC": "1"}))],
}
ALONE = [("memory outside the slab", parts("memory")),
         ("sweep into a limit", sweep),
         ("sweep to the end of memory", end_of_memory),
         ("benchmark", benchmark),
         ("offload: planned and measured", offload_memory)]
# Minutes and tens of gigabytes each: only where their names are asked for.
ASKED = [("8b offload: batch 1", offload_8b(1, "optimizer")),
         ("8b offload: batch 1, updates on the host", offload_8b(1, "optimizer", "--update-on", "cpu")),
         ("8b offload: batch 1, masters in float32", offload_8b(1, "optimizer", "--master-weights", "f32")),
         ("8b offload: batch 8", offload_8b(8, "optimizer", "--recompute", "block")),
         ("8b offload: batch 8, without", offload_8b(8, "none", "--recompute", "block")),
         ("8b offload: batch 4, weights too", offload_8b(4, "optimizer+weights", "--recompute", "block")),
         ("8b offload: batch 4, activations", offload_8b(4, "optimizer+activations", "--recompute", "block")),
         *[(f"8b activations: {name}", activations_8b(name)) for name in ACTIVATIONS]]


class Result:
    def __init__(self, name, status, seconds, note):
        self.name, self.status, self.seconds, self.note = name, status, seconds, note


def perform(b, lane, name, check):
    began = time.monotonic()
    try:
        status, note = "ok", check(b, lane)
    except Failed as failure:
        status, note = "FAILED", str(failure)
    except Skipped as why:
        status, note = "skipped", str(why)
    except Exception as error:  # A bug of a check must not take the others down.
        status, note = "FAILED", f"{type(error).__name__}: {error}"
    result = Result(name, status, time.monotonic() - began, note)
    b.log.write(f"== {name}: {status}, {result.seconds:.1f} s: {note}")
    print(f"  {status:<8}{result.seconds:6.1f} s  {name}", flush=True)
    return result


def chosen(words):
    """All checks but those that must be asked for; with words, those whose names begin with one of them."""
    if not words:
        return LANES, ALONE
    wanted = lambda checks: [(name, check) for name, check in checks if any(name.startswith(w) for w in words)]
    lanes = {lane: wanted(checks) for lane, checks in LANES.items()}
    return {lane: checks for lane, checks in lanes.items() if checks}, wanted(ALONE + ASKED)


def perform_all(b, lanes, alone):
    results = []
    workers = max(1, min(len(lanes), b.cores // 4)) if lanes else 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        run = lambda lane: [perform(b, lane, name, check) for name, check in lanes[lane]]
        for found in pool.map(run, lanes):
            results += found
    return results + [perform(b, "alone", name, check) for name, check in alone]


def table(results, heading):
    """At most 8,000 characters: the notes are cut to what is left."""
    failed = [r for r in results if r.status == "FAILED"]
    width = max(40, min(220, 7000 // max(1, len(results)) - 52))
    rows = [heading, f"{'check':<34}{'status':<9}{'s':>6}  note"]
    rows += [f"{r.name[:33]:<34}{r.status:<9}{r.seconds:>6.1f}  {' '.join(r.note.split())[:width]}" for r in results]
    skipped = sum(r.status == "skipped" for r in results)
    rows.append(f"{len(results)} checks, {len(failed)} failed, {skipped} skipped")
    return "\n".join(rows)


def unpack(source, second, work):
    """The programs, the fixtures, and SmolLM2 where both of its parts are there."""
    for name in ("plimsoll", "gpu_check"):
        path = os.path.join(work, name)
        with lzma.open(os.path.join(source, name + ".xz")) as packed, open(path, "wb") as program:
            shutil.copyfileobj(packed, program)
        os.chmod(path, 0o755)
    fixtures = os.path.join(work, ".gpu")
    os.makedirs(os.path.join(fixtures, "models"))
    for name in ("golden", "text", "data"):
        os.symlink(os.path.join(source, name), os.path.join(fixtures, name))
    for path in glob.glob(os.path.join(source, "models", "*")):
        os.symlink(path, os.path.join(fixtures, "models", os.path.basename(path)))
    both = [os.path.join(second, "smollm2-135m.part1"), os.path.join(source, "smollm2-135m.part2")]
    if not all(map(os.path.exists, both)):
        return "SmolLM2-135M left out"
    digest, model = hashlib.sha256(), os.path.join(fixtures, "models", "smollm2-135m.gguf")
    with open(model, "wb") as whole:
        for part in both:
            with open(part, "rb") as file:
                data = file.read()
            digest.update(data)
            whole.write(data)
    with open(os.path.join(source, "smollm2-135m.sha256"), encoding="ascii") as file:
        if file.read().strip() == digest.hexdigest():
            return "with SmolLM2-135M"
    os.remove(model)
    return "SmolLM2-135M left out: .gpu and .gpu2 are of different builds"


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    source, second = os.path.join(root, ".gpu"), os.path.join(root, ".gpu2")
    if not os.path.exists(os.path.join(source, "gpu_check.xz")):
        print("error: .gpu holds no build: run scripts/gpu-check build first, and carry the folder", file=sys.stderr)
        return 2
    log = Log(os.path.join(os.environ.get("OUT") or source, "gpu-check.log"))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plimsoll-gpu-check-") as work:
        smollm2 = unpack(source, second, work)
        b = Bench(source, work, log)
        with open(os.path.join(source, "versions"), encoding="utf-8") as file:
            built = ", ".join(file.read().split("\n")).strip(", ")
        # A part that does not exist: only the device is looked at.
        try:
            out, err, _ = b.run([b.gpu_check, "device"], "alone", 60, expect=None)
        except (Failed, OSError) as failure:
            out, err = "", str(failure)
        memory = re.search(r'name: "([^"]*)", memory_bytes: (\d+)', out)
        if not memory:
            print(f"error: no GPU was checked: {last_line(err)}", file=sys.stderr)
            return 1
        b.memory = int(memory[2])
        print(f"{memory[1]}, {gib(b.memory)}; {smollm2}", flush=True)
        results = perform_all(b, *chosen(sys.argv[1:]))
        heading = f"\n{memory[1]}, {built}, {smollm2}; {time.monotonic() - began:.0f} s"
    text = table(results, heading)
    log.write(text)
    print(text)
    return 1 if any(r.status == "FAILED" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
