"""Settings of the section ``cluster`` that are valid alone but not together with others."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.config.clash import Check, Clash, Layers
from headwater.config.keys import settings, value_at
from headwater.config.schema import Config


def changed_in(config: Config, section: str) -> list[str]:
    """The keys of a section that differ from their defaults: a resolved recipe gives every key, and must load again."""
    known = settings(Config)
    return [key for key in known if key.startswith(f"{section}.") and value_at(config, key) != known[key].default()]


def cluster_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.cluster.kind == "local":
        for key in changed_in(config, "cluster"):
            yield Clash(
                (key, "cluster.kind"),
                "nothing reads this, because cluster.kind = local uses only this machine; use cluster=ray, or remove "
                "this",
            )
        return
    if config.rollout.servers:
        for key in changed_in(config, "cluster.rollout"):
            yield Clash(
                (key, "rollout.servers"),
                "nothing reads this, because rollout.servers names running servers; remove one of the two",
            )
    for part, num_actors in (("reward", config.cluster.reward.num_actors), ("tools", config.cluster.tools.num_actors)):
        for key in changed_in(config, f"cluster.{part}") if not num_actors else ():
            yield Clash(
                (key, f"cluster.{part}.num_actors"),
                f"nothing reads this without actors; set cluster.{part}.num_actors, or remove this",
            )
    if config.cluster.tools.num_actors and not config.tools.use and not config.tools.config:
        yield Clash(
            ("cluster.tools.num_actors", "tools.use"),
            "nothing reads this, because the recipe has no tools; set tools.use or tools.config, or use 0 actors",
        )


def ray_places_servers(config: Config, layers: Layers) -> Iterator[Clash]:
    cluster, rollout = config.cluster, config.rollout
    if cluster.kind != "ray" or rollout.servers:
        return
    if rollout.launch.devices:
        yield Clash(
            ("rollout.launch.devices", "cluster.kind"),
            "Ray chooses the devices of the servers that it starts; remove this",
        )
    if rollout.placement == "colocated" and rollout.launch.num_servers > cluster.learner.num_ranks:
        yield Clash(
            ("rollout.launch.num_servers", "cluster.learner.num_ranks", "rollout.placement"),
            "a colocated server shares the device of a learner rank, and there are only "
            f"cluster.learner.num_ranks = {cluster.learner.num_ranks}; use at most that, or "
            "rollout.placement=disaggregated",
        )
    if rollout.placement == "colocated" and cluster.rollout.labels:
        yield Clash(
            ("cluster.rollout.labels", "rollout.placement"),
            "a colocated server runs on the node of its learner rank; use cluster.learner.labels, or "
            "rollout.placement=disaggregated",
        )


def ray_chooses_gpus(config: Config, layers: Layers) -> Iterator[Clash]:
    for key in ("model.device", "rollout.device"):
        device = value_at(config, key)
        if config.cluster.kind == "ray" and device.startswith("cuda:"):
            yield Clash((key, "cluster.kind"), "Ray chooses which GPU an actor uses; use auto, cuda or cpu")


def ranks_have_samples(config: Config, layers: Layers) -> Iterator[Clash]:
    num_ranks, num_context = config.cluster.learner.num_ranks, config.learner.context_parallel
    if config.cluster.kind == "ray" and num_ranks % num_context:
        yield Clash(
            ("learner.context_parallel", "cluster.learner.num_ranks"),
            f"{num_ranks} ranks cannot form groups of {num_context}; use a multiple of {num_context} ranks",
        )
    num_rows = config.trainer.num_prompts_per_step * config.rollout.num_samples_per_prompt
    if config.cluster.kind == "ray" and num_ranks > num_rows * num_context:
        yield Clash(
            ("cluster.learner.num_ranks", "trainer.num_prompts_per_step"),
            f"a step has only {num_rows} samples; use at most {num_rows * num_context} ranks, or raise "
            "trainer.num_prompts_per_step",
        )


def restarts_have_checkpoints(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.cluster.max_restarts and not config.trainer.saves_during_training:
        yield Clash(
            ("cluster.max_restarts", "trainer.checkpoint_every_steps"),
            "the run saves its only checkpoint at the end, so a restart would begin again; set "
            "trainer.checkpoint_every_steps, checkpoint_every_epochs or checkpoint_every_minutes too",
        )


def reward_actors_run_processes(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.cluster.kind != "ray" or not config.cluster.reward.num_actors:
        return
    if config.reward.where != "processes":
        yield Clash(
            ("cluster.reward.num_actors", "reward.where"),
            f"reward.where = {config.reward.where} scores in the process of the training loop; use "
            "reward.where=processes, or 0 actors",
        )
    if config.reward.workers:
        yield Clash(
            ("reward.workers", "cluster.reward.num_actors"),
            "actors score instead of local workers, each with cluster.reward.cpus_per_actor of them; set it back to 0",
        )


CLUSTER_CHECKS: tuple[Check, ...] = (
    cluster_settings_are_read,
    ray_places_servers,
    ray_chooses_gpus,
    ranks_have_samples,
    restarts_have_checkpoints,
    reward_actors_run_processes,
)
