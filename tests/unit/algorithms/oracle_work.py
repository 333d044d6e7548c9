"""Balancing, packing and admission: properties and counts against verl and AReaL."""

from __future__ import annotations

from algorithms.oracle import family, property_family

from headwater.learner.partition import pack, pack_evenly, partition, workload
from headwater.rollout.staleness import Admission, StalenessManager


def spread(parts, sizes):
    sums = [sum(sizes[item] for item in part) for part in parts]
    return max(sums) - min(sums)


def assert_covers(parts, count):
    assert sorted(item for part in parts for item in part) == list(range(count))
    assert all(parts)


@property_family("verl_seqlen_balance")
def check_balance(args, inputs, expected):
    sizes = inputs["seqlens"]
    # With equal_size verl gives all parts the same number of items. Our parts may differ in size, and must be as even.
    parts = partition(sizes, args["k_partitions"])
    assert len(parts) == args["k_partitions"]
    assert_covers(parts, len(sizes))
    assert spread(parts, sizes) <= expected["spread"]


@property_family("verl_group_balance")
def check_group_balance(args, inputs, expected):
    lengths, groups = inputs["seqlens"], inputs["uids"]
    members = [[row for row, each in enumerate(groups) if each == group] for group in dict.fromkeys(groups)]
    costs = [sum(workload(lengths[row]) for row in rows) for rows in members]
    # verl gives all parts the same number of groups. Ours may differ, and must be as even.
    parts = [[row for group in part for row in members[group]] for part in partition(costs, args["k_partitions"])]
    assert_covers(parts, len(lengths))
    assert spread(parts, [workload(length) for length in lengths]) <= expected["workload_spread"]


@property_family("verl_micro_batches")
def check_micro_batches(args, inputs, expected):
    lengths, size = inputs["seqlens"], args["force_group_size"]
    for packing in (pack, pack_evenly):
        groups = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
        bins = packing(groups, args["max_token_len"])
        assert_covers(bins, len(groups))
        assert all(sum(groups[item] for item in each) <= args["max_token_len"] for each in bins)
        assert len(bins) <= expected["n_micro"]


@property_family("areal_packing")
def check_packing(args, inputs, expected):
    sizes = inputs["values"]
    divisor = args["n_groups_divisor"]

    def in_multiples(packing):
        num_bins = max(len(packing(sizes, args["capacity"])), args["min_groups"])
        return packing(sizes, args["capacity"], min_bins=-(-num_bins // divisor) * divisor)

    first_fit, even = in_multiples(pack), in_multiples(pack_evenly)
    for bins in (first_fit, even):
        assert_covers(bins, len(sizes))
        assert all(sum(sizes[item] for item in each) <= args["capacity"] for each in bins)
        assert len(bins) >= args["min_groups"]
        assert len(bins) % divisor == 0
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
    admission = Admission(batch_size=args["consumer_batch_size"], max_staleness=args["max_staleness"])
    return {"trace": trace, "pending_limit": admission.most_ahead}
