"""The run of scripts/gpu-check --gpus N: several GPUs of one machine against one of them.

Losses of every ZeRO stage, planned and measured bytes of every rank, resume on fewer
GPUs, processes instead of threads, a rank that is killed, and a short benchmark.
"""
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import gpu_check
from gpu_check import Bench, Failed, Log, Skipped, curve, deviation, gib, last_line, perform, table, unpack

# Float32 differs in the order of its sums alone.
EXACT = 1e-5
ROUNDED = 1e-2
NOISY = 3e-2
MEAN = 1e-3
# A rank that ends takes the others along within so many seconds.
NOTICE = 30


def train(b, lane, name, precision, steps, options, accumulate, extra=None):
    out = os.path.join(b.folder("ranks"), name)
    command = ["train", "--device", "cuda", "--model", model(b), "--data", b.data, "--precision", precision, "--batch",
               "4", "--seq", "256", "--steps", str(steps), "--schedule", "constant", "--warmup", "0", "--lr", "5e-4",
               "--save-every", "10", "--accumulate", str(accumulate), "--out", out, *options]
    b.json(command, lane, 150, extra)
    found = curve(out)
    if len(found) != steps:
        raise Failed(f"{name}: {len(found)} losses of {steps} steps")
    return found


def model(b):
    try:
        return b.model("stories260K-hf")
    except Skipped:
        return "plimsoll-tiny"


def ranks(b, zero, more=()):
    return ["--gpus", str(b.gpus), "--zero", str(zero), *more]


def losses(b, lane):
    """Every stage, with one micro-batch a rank and with two, against one GPU."""
    said = []
    for accumulate in (1, 2):
        one = train(b, lane, f"one-{accumulate}", "f32", 20, [], accumulate * b.gpus)
        for zero in range(4):
            many = train(b, lane, f"zero{zero}-{accumulate}", "f32", 20, ranks(b, zero), accumulate)
            said.append(deviation(many, one, EXACT, f"{zero}/{accumulate}"))
    return f"float32, ZeRO/accumulation: {', '.join(said)}"


def losses_bf16(b, lane):
    one = train(b, lane, "one-bf16", "bf16", 50, [], b.gpus)
    said = []
    for zero, more in ((1, []), (3, []), (3, ["--reduce-dtype", "f32"]), (2, ["--optimizer", "adamw8bit"])):
        if "--optimizer" in more:
            one = train(b, lane, "one-8bit", "bf16", 50, more, b.gpus)
        many = train(b, lane, f"bf16-{zero}-{len(said)}", "bf16", 50, ranks(b, zero, more), 1)
        name = f"ZeRO {zero} {' '.join(more)}".strip()
        # Single batches amplify what eight bits round (on the CPU too: 0.6 % at one of 50);
        # their mean does not.
        said.append(deviation(many, one, NOISY if "adamw8bit" in more else ROUNDED, name))
        said.append(deviation([sum(many)], [sum(one)], MEAN, "mean"))
    return "; ".join(said)


def adapters(b, lane):
    said = []
    for method in ("lora", "qlora"):
        options = ["--method", method, "--lora-rank", "8"]
        one = train(b, lane, f"one-{method}", "f32", 15, options, b.gpus)
        many = train(b, lane, f"three-{method}", "f32", 15, ranks(b, 3, options), 1)
        said.append(deviation(many, one, EXACT, method))
    return f"ZeRO 3: {', '.join(said)}"


def resumed(b, lane):
    """Ten steps on all GPUs, then ten on one, against twenty on one."""
    straight = train(b, lane, "straight", "f32", 20, [], b.gpus)
    out = ["--out", os.path.join(b.folder("ranks"), "resumed")]
    command = ["train", "--device", "cuda", "--model", model(b), "--data", b.data, "--precision", "f32", "--batch", "4",
               "--seq", "256", "--schedule", "constant", "--warmup", "0", "--lr", "5e-4", "--save-every", "10", *out]
    b.json([*command, *ranks(b, 3), "--steps", "10"], lane, 120)
    b.json([*command, "--accumulate", str(b.gpus), "--steps", "20", "--resume"], lane, 120)
    return deviation(curve(out[1]), straight, EXACT, f"{b.gpus} GPUs, then one")


def offloaded(b, lane):
    """What lives in host memory, and updates on either side, against one GPU without."""
    one = train(b, lane, "one-offload", "f32", 20, [], b.gpus)
    said = []
    for zero, where, on in ((1, "optimizer", "gpu"), (3, "optimizer", "gpu"), (1, "optimizer", "cpu"), (3, "optimizer", "cpu"),
                            (1, "optimizer+weights", "gpu"), (3, "optimizer+weights", "cpu"), (3, "activations", None)):
        options = ["--offload", where, *(["--update-on", on] if on else [])]
        name = f"ZeRO {zero} {where} {on or ''}".strip()
        many = train(b, lane, f"offload-{len(said)}", "f32", 20, ranks(b, zero, options), 1)
        said.append(deviation(many, one, EXACT, name))
    return "; ".join(said)


def collectives(b, lane):
    """Copies and NCCL sum the same numbers, in another order."""
    said = []
    for zero in range(4):
        copies, nccl = (train(b, lane, f"{name}-{zero}", "f32", 20, ranks(b, zero, ["--collectives", name]), 1)
                        for name in ("copies", "nccl"))
        said.append(deviation(copies, nccl, EXACT, f"ZeRO {zero}"))
    return "; ".join(said)


def processes(b, command, lane):
    """One process a GPU, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(b.gpus):
        extra = {"RANK": str(rank), "WORLD_SIZE": str(b.gpus), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(b.gpus),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started.append(b.start([b.plimsoll, *command], lane, extra))
    return started


def launched(b, lane):
    """Processes train as threads do; a killed one takes the others along, with its name."""
    expected = train(b, lane, "as-threads", "f32", 20, ranks(b, 3), 1)
    base = ["train", "--device", "cuda", "--model", model(b), "--data", b.data, "--precision", "f32", "--batch", "4",
            "--seq", "256", "--schedule", "constant", "--warmup", "0", "--lr", "5e-4", "--zero", "3", "--format", "json"]
    out = os.path.join(b.folder("ranks"), "as-processes")
    command, began = [*base, "--steps", "20", "--save-every", "10", "--out", out], time.monotonic()
    for rank, process in enumerate(processes(b, command, lane)):
        _, err, status = b.finish(process, command, 120, began)
        if status != 0:
            raise Failed(f"rank {rank}: status {status}, {last_line(err)}")
    said = deviation(curve(out), expected, EXACT, "processes")

    out = os.path.join(b.folder("ranks"), "killed")
    command, began = [*base, "--steps", "100000", "--save-every", "20", "--out", out], time.monotonic()
    started = processes(b, command, lane)
    while not os.path.exists(os.path.join(out, "checkpoint-00000020")):
        if time.monotonic() - began > 90 or any(p.poll() is not None for p in started):
            break
        time.sleep(0.05)
    started[-1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    b.finish(started[-1], command, 10, began)
    _, err, status = b.finish(started[0], command, NOTICE, began)
    took = time.monotonic() - killed
    for process in started[1:-1]:
        b.finish(process, command, NOTICE, began)
    if status != 1 or f"rank {b.gpus - 1}" not in err:
        raise Failed(f"the rest: status {status} after {took:.0f} s, {last_line(err)}")
    b.json([*base[:-2], "--steps", "60", "--save-every", "20", "--out", out, "--gpus", str(b.gpus), "--resume"], lane,
           120)
    return f"{said}; a killed rank ends the rest in {took:.1f} s, and resume goes on"


def point(b, lane, options, timeout, gpus=None):
    many = ["--gpus", str(gpus)] if gpus else []
    out, _, _ = b.run([b.plimsoll, "point", "--device", "cuda", "--full-rows", "--seq", "2048", *options, *many], lane,
                      timeout)
    row = gpu_check.json.loads(out)
    pairs = list(zip(row.get("rank_planned_bytes", [row["planned_bytes"]]),
                     row.get("rank_measured_bytes", [row["measured_bytes"]])))
    row["worst"] = max(abs(measured / planned - 1) for planned, measured in pairs)
    return row


def memory(b, lane):
    said = []
    for zero, more in [*((zero, []) for zero in range(4)), (3, ["--collectives", "nccl"])]:
        row = point(b, lane, ["--model", "qwen1.5-0.5b", "--batch", "2", "--zero", str(zero), "--iterations", "3",
                              *more], 120, b.gpus)
        if row["worst"] > gpu_check.MEMORY:
            raise Failed(f"ZeRO {zero}: planned {row['rank_planned_bytes']}, measured {row['rank_measured_bytes']}")
        said.append(f"{' '.join([str(zero), *more[1:]])}: {gib(row['measured_bytes'])} {100 * row['worst']:.2f} %")
    return f"qwen1.5-0.5b, every rank within: {', '.join(said)}"


def together(b, options):
    """A point on every GPU at the same time, each in a process of its own."""
    command = [b.plimsoll, "point", "--device", "cuda", "--full-rows", "--seq", "2048", *options]
    began = time.monotonic()
    started = [b.start(command, "alone", {"CUDA_VISIBLE_DEVICES": str(gpu)}) for gpu in range(b.gpus)]
    rows = []
    for process in started:
        out, err, status = b.finish(process, command, 240, began)
        if status != 0:
            raise Failed(f"status {status}: {last_line(err)}")
        rows.append(gpu_check.json.loads(out))
    return rows


EIGHT = ["--model", "llama-3-8b", "--batch", "4", "--optimizer-dtype", "bf16", "--max-grad-norm", "1.0", "--recompute",
         "norms", "--iterations", "6", "--warmup", "2"]


def benchmark(b, lane):
    """Llama-3-8B, batch 4 a GPU: every GPU alone and all at once, ZeRO 1 and ZeRO 3, as copies
    and over NCCL. A step of several takes as long as the slowest of them."""
    alone = together(b, EIGHT)
    one = min(alone, key=lambda row: row["tokens_per_second"])
    rates = ", ".join(f"{row['tokens_per_second']:.0f}" for row in alone)
    said = [f"GPUs alone, all at once: {rates} tokens/s, {gib(one['measured_bytes'])}"]
    for zero, more in ((1, []), (3, []), (1, ["--collectives", "nccl"]), (3, ["--collectives", "nccl"])):
        row = point(b, lane, [*EIGHT, "--zero", str(zero), *more], 240, b.gpus)
        rate = row["tokens_per_second"] / b.gpus
        planned = row["planned_seconds"] / row["seconds_per_iteration"] - 1
        name = " ".join(["ZeRO", str(zero), *more[1:]])
        said.append(f"{name}: {rate:.0f} tokens/s/GPU, {rate / one['tokens_per_second']:.3f} of the slowest, planned "
                    f"{100 * planned:+.0f} %, {gib(row['measured_bytes'])} ({100 * row['worst']:.2f} % off)")
    return "; ".join(said)


CHECKS = [("losses, every ZeRO stage", losses),
          ("losses in bf16", losses_bf16),
          ("adapters", adapters),
          ("offload", offloaded),
          ("copies and NCCL", collectives),
          ("collectives as copies, bit for bit", gpu_check.parts("ranks", extra=gpu_check.QUEUES)),
          ("resume on one GPU", resumed),
          ("processes; a killed rank", launched),
          ("bytes of every rank", memory),
          ("benchmark, Llama-3-8B", benchmark)]


def main():
    gpus = int(sys.argv[1])
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    source = os.path.join(root, ".gpu")
    if not os.path.exists(os.path.join(source, "gpu_check.xz")):
        print("error: .gpu holds no build: run scripts/gpu-check build first, and carry the folder", file=sys.stderr)
        return 2
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    if found < gpus:
        print(f"error: {gpus} GPUs are asked for, and nvidia-smi lists {found}", file=sys.stderr)
        return 1
    log = Log(os.path.join(os.environ.get("OUT") or source, f"gpu-check-{gpus}.log"))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plimsoll-gpu-ranks-") as work:
        unpack(source, os.path.join(root, ".gpu2"), work)
        b = Bench(source, work, log)
        b.gpus = gpus
        chosen = [(name, check) for name, check in CHECKS if re.search(only, name)]
        results = [perform(b, "alone", name, check) for name, check in chosen]
    text = table(results, f"\n{gpus} GPUs; {time.monotonic() - began:.0f} s")
    log.write(text)
    print(text)
    return 1 if any(r.status == "FAILED" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
