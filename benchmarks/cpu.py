"""The CPU backend beside torch's scaled_dot_product_attention, called once per sequence.

    python benchmarks/cpu.py [--threads N] [--rounds N] [--json FILE]

Both run on the same number of threads in alternating rounds of one process, so that what else the machine does falls on
both. The table shows medians; the JSON file holds every sample.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import time

CASES = [
    # (dtype, head_dim, sequence length, sequences)
    (dtype, head_dim, length, sequences)
    for dtype in ("float32", "bfloat16")
    for head_dim in (64, 128)
    for length, sequences in ((512, 4), (2048, 1))
]
HEADS = 8


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: the affinity mask")
    parser.add_argument("--rounds", type=int, default=11, help="timed calls of each per case (default: 11)")
    parser.add_argument("--json", metavar="FILE", help="write all samples to FILE")
    arguments = parser.parse_args()
    if arguments.threads < 1 or arguments.rounds < 1:
        parser.error("--threads and --rounds must be at least 1")
    return arguments


def processor():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def run_case(torch, ragged_attention, case, rounds):
    dtype, head_dim, length, sequences = case
    torch.manual_seed(0)
    total = length * sequences
    q, k, v = (torch.randn(total, HEADS, head_dim).to(getattr(torch, dtype)) for _ in range(3))
    bounds = [i * length for i in range(sequences + 1)]
    offsets = torch.tensor(bounds, dtype=torch.int32)

    def ours():
        return ragged_attention.ragged_flash_attention(q, k, v, offsets, mask_str="causal")

    def peer(q=q, k=k, v=v):
        out = torch.empty_like(q)
        for begin, end in itertools.pairwise(bounds):
            rows = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            result = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True)
            out[begin:end] = result.squeeze(0).transpose(0, 1)
        return out

    reference = peer(q.double(), k.double(), v.double())
    errors = {
        name: ((function().double() - reference).norm() / reference.norm()).item()
        for name, function in (("ragged_attention", ours), ("torch", peer))
    }
    samples = {"ragged_attention": [], "torch": []}
    for _ in range(rounds):
        for name, function in (("torch", peer), ("ragged_attention", ours)):
            start = time.perf_counter()
            function()
            samples[name].append(time.perf_counter() - start)
    return {
        "dtype": dtype,
        "head_dim": head_dim,
        "length": length,
        "sequences": sequences,
        "heads": HEADS,
        "mask": "causal",
        "flop": 2 * sequences * HEADS * length * (length + 1) * head_dim,
        "relative_error": errors,
        "seconds": samples,
    }


def main():
    arguments = parse_arguments()
    # Read at the first call of the library.
    os.environ["RAGGED_ATTENTION_NUM_THREADS"] = str(arguments.threads)
    import torch

    import ragged_attention

    torch.set_num_threads(arguments.threads)
    print(f"{processor()}, {arguments.threads} threads, torch {torch.__version__}, causal, {HEADS} heads")
    names = ("dtype", "head_dim", "sequences", "ours ms", "torch ms", "GFLOP/s", "speed-up")
    print("{:9} {:>8} {:>10} {:>9} {:>9} {:>8} {:>8}".format(*names))
    results = []
    with torch.no_grad():
        for case in CASES:
            result = run_case(torch, ragged_attention, case, arguments.rounds)
            results.append(result)
            ours = statistics.median(result["seconds"]["ragged_attention"])
            peer = statistics.median(result["seconds"]["torch"])
            print(
                f"{result['dtype']:9} {result['head_dim']:8} {result['sequences']:>4} x {result['length']:<4}"
                f"{ours * 1e3:10.2f} {peer * 1e3:9.2f} {result['flop'] / ours * 1e-9:8.1f} {peer / ours:8.2f}",
                flush=True,
            )
    if arguments.json:
        report = {
            "processor": processor(),
            "threads": arguments.threads,
            "torch": torch.__version__,
            "build": ragged_attention.build_info(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "results": results,
        }
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
