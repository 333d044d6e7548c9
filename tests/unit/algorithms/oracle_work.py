"""Balancing, packing and admission: properties and counts against verl and AReaL."""

from __future__ import annotations

from algorithms.oracle import family, property_family

from headwater.learner.partition import pack, pack_evenly, partition, partition_groups, workload
from headwater.rollout.staleness import StalenessManager


def spread(parts, sizes):
    sums = [sum(sizes[item] for item in part) for part in parts]
    return max(sums) - min(sums)


def assert_covers(parts, count):
    assert sorted(item for part in parts for item in part) == list(range(count))
    assert all(parts)


@property_family("verl_seqlen_balance")
def check_balance(args, inputs, expected):
    sizes = inputs["seqlens"]
    parts = partition(sizes, args["k_partitions"], equal_sizes=bool(args["equal_size"]))
    assert len(parts) == args["k_partitions"]
    assert_covers(parts, len(sizes))
    if args["equal_size"]:
        assert len({len(part) for part in parts}) == 1
    assert spread(parts, sizes) <= expected["spread"]


@property_family("verl_group_balance")
def check_group_balance(args, inputs, expected):
    lengths, groups = inputs["seqlens"], inputs["uids"]
    parts = partition_groups(lengths, groups, args["k_partitions"])
    assert_covers(parts, len(lengths))
    members = [{groups[row] for row in part} for part in parts]
    assert sum(len(each) for each in members) == len(set(groups)), "a group is in two parts"
    assert len({len(each) for each in members}) == 1
    assert spread(parts, [workload(length) for length in lengths]) <= expected["workload_spread"]


@property_family("verl_micro_batches")
def check_micro_batches(args, inputs, expected):
    lengths, size = inputs["seqlens"], args["force_group_size"]
    for packing in (pack, pack_evenly):
        bins = packing(lengths, args["max_token_len"], group_size=size)
        assert_covers(bins, len(lengths))
        assert all(sum(lengths[row] for row in each) <= args["max_token_len"] for each in bins)
        owner = {row: number for number, each in enumerate(bins) for row in each}
        assert all(owner[row] == owner[row - row % size] for row in owner), "a group is in two bins"
        assert len(bins) <= expected["n_micro"]


@property_family("areal_packing")
def check_packing(args, inputs, expected):
    sizes = inputs["values"]
    limits = {"min_bins": args["min_groups"], "multiple_of": args["n_groups_divisor"]}
    first_fit = pack(sizes, args["capacity"], **limits)
    even = pack_evenly(sizes, args["capacity"], **limits)
    for bins in (first_fit, even):
        assert_covers(bins, len(sizes))
        assert all(sum(sizes[item] for item in each) <= args["capacity"] for each in bins)
        assert len(bins) >= args["min_groups"]
        assert len(bins) % args["n_groups_divisor"] == 0
    assert len(first_fit) <= expected["ffd_n_groups"]
    assert len(even) <= expected["kk_n_groups"]
    assert spread(even, sizes) <= expected["kk_spread"]


@family("areal_staleness")
def run_staleness(args, inputs):
    manager = StalenessManager(
        max_concurrent=args["max_concurrent_rollouts"],
        batch_size=args["consumer_batch_size"],
        max_staleness=args["max_staleness"],
    )
    version = 0
    events = {
        "enqueue": manager.enqueue,
        "submit": manager.start,
        "accept": manager.accept,
        "reject": manager.reject,
    }

    def state():
        counts = manager.counts
        return [manager.capacity(version), counts.enqueued, counts.running, counts.accepted, counts.rejected]

    trace = [state()]
    for name, number in inputs["events"]:
        if name in events:
            for _ in range(number):
                events[name]()
        else:
            version = number
            if name == "recover":
                manager.recover(version)
        trace.append(state())
    return {"trace": trace, "pending_limit": manager.pending_limit}
