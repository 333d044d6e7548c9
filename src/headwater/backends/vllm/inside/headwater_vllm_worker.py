"""Runs in vLLM's worker processes (``--worker-extension-cls headwater_vllm_worker.Worker``).

Headwater is not installed in that environment, so this file uses only what vLLM has.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from headwater_vllm_weights import (  # type: ignore[import-not-found]  # its folder is on the path of the workers
    ArrivalError,
    Arriving,
    GroupReader,
    LentMemory,
    SlotReader,
    join_group,
)

logger = logging.getLogger("vllm.headwater")  # below vLLM's own, which has a handler


def _answered(method: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    """Let a method return why it failed instead of raising, with the ``call`` that it answers.

    vLLM reads the answers of tensor-parallel workers one after another, and stops at the first one that raised. It
    would then take the unread answers of the others for those of the next call.
    """

    @functools.wraps(method)
    def answer(self: Worker, *, call: str = "", **arguments: Any) -> dict[str, Any]:
        try:
            told = method(self, **arguments) or {}
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            told = {"failure": f"{type(error).__name__}: {error}"}
        return {**told, "call": call}

    return answer


class Worker:
    """Methods in addition to those of vLLM's worker, whose class it becomes a base of."""

    _headwater_memory: LentMemory | None = None
    """The slots of the last update, which stay mapped for the next one."""
    _headwater_group: Any = None
    """Name and process group over which weights come."""

    @_answered
    def headwater_describe(self) -> dict[str, Any]:
        """The settings that ``/server_info`` tells too, which takes half a minute for other things."""
        from vllm import envs

        config = self.vllm_config  # type: ignore[attr-defined]
        model, parallel = config.model_config, config.parallel_config
        texts = model.hf_text_config.to_dict()
        return {
            "instance_id": str(config.instance_id),
            "model_config": {
                "model": str(model.model),
                "dtype": str(model.dtype),
                "max_model_len": model.max_model_len,
                "logprobs_mode": str(model.logprobs_mode),
                "enable_sleep_mode": bool(model.enable_sleep_mode),
                # Its folder does not tell it any more after the first reload.
                "text_config": {key: each for key, each in texts.items() if isinstance(each, (int, str))},
            },
            "scheduler_config": {"max_num_seqs": config.scheduler_config.max_num_seqs},
            "device_config": {"device": str(config.device_config.device_type)},
            "parallel_config": {
                "worker_extension_cls": parallel.worker_extension_cls,
                "world_size": parallel.world_size,
                "data_parallel_size": parallel.data_parallel_size,
            },
            "headwater": {"receives_weights": True},
            "lora_config": {"max_lora_rank": config.lora_config.max_lora_rank} if config.lora_config else None,
            "loads_adapters": bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING),
        }

    @_answered
    def headwater_adapter_problem(self, layers: list[str]) -> dict[str, str]:
        """Which of these layers of the run's model cannot have adapters in vLLM's; an empty text if all can.

        vLLM would leave out adapters of layers that it has not prepared, without an error.
        """
        from vllm.lora.utils import parse_fine_tuned_lora_name

        runner = self.model_runner  # type: ignore[attr-defined]
        if not hasattr(runner, "lora_manager"):
            return {"problem": "it computes no adapters"}
        manager = runner.lora_manager._adapter_manager
        prepared = set(manager.modules)
        for whole, parts in manager.packed_modules.items():
            if whole in prepared:
                prepared.update(parts)
        names = getattr(manager.model, "hf_to_vllm_mapper", None)
        renamed = names.get_rename_mapper() if names is not None else None
        missing = [
            each
            for each in layers
            if parse_fine_tuned_lora_name(f"base_model.model.{each}.lora_A.weight", renamed)[0] not in prepared
        ]
        return {
            "problem": f"it cannot compute adapters of {len(missing)} layers, such as {missing[0]}" if missing else ""
        }

    @_answered
    def headwater_load_adapters(self, folder: str, is_new: bool = False, number: int = 0) -> dict[str, bool]:
        """Load the adapters of a folder in place of those before. Requests in progress continue with them.

        ``number`` is what vLLM knows them by. If it is not given, it is that of the adapters that were loaded last,
        which ``is_new`` says have just been given a name. False if there are none.
        """
        from vllm.lora.request import LoRARequest

        worker: Any = self
        if is_new:
            worker.headwater_adapters = max(worker.list_loras())
        number = number or getattr(worker, "headwater_adapters", 0)
        if number:
            worker.add_lora(LoRARequest(lora_name="headwater", lora_int_id=number, lora_path=folder, load_inplace=True))
        return {"is_loaded": number > 0}

    @_answered
    def headwater_reload(self, folder: str) -> None:
        """Load the safetensors files of a folder."""
        self._headwater_load(weights_path=folder)

    @_answered
    def headwater_receive_slots(self, **order: Any) -> dict[str, str]:
        """Load weights from shared memory. Returns their checksum, or why they did not arrive completely."""
        worker: Any = self
        try:
            reader = SlotReader(worker.rank, worker.device, kept=self._headwater_memory, **order)
        except ArrivalError as error:
            return {"failure": str(error)}
        self._headwater_memory = reader.memory
        try:
            return self._headwater_receive(reader)
        except BaseException:
            reader.give_up()  # so that the others learn it before they wait for their next slot in vain
            raise

    @_answered
    def headwater_release_slots(self) -> None:
        """Unmap the slots of the last update. Shared memory is free again only when no process has it mapped."""
        self._headwater_memory = None

    @_answered
    def headwater_join_group(self, address: str, port: int, name: str, size: int, limit_s: float) -> None:
        """Join the group over which weights come, as the member after those of smaller ranks."""
        worker: Any = self
        self._headwater_group = None  # an earlier one, of a sender that has ended
        self._headwater_group = (name, join_group(address, port, name, worker.rank + 1, size, limit_s))

    @_answered
    def headwater_leave_group(self, name: str) -> None:
        if self._headwater_group is not None and self._headwater_group[0] == name:
            self._headwater_group = None

    @_answered
    def headwater_receive_group(self, name: str, **order: Any) -> dict[str, str]:
        """Load weights that come over the group. Returns the same as ``headwater_receive_slots``."""
        worker: Any = self
        if self._headwater_group is None or self._headwater_group[0] != name:
            return {"failure": f"this worker is not in the group {name}"}
        answer = {"failure": "vLLM cannot load the weights"}
        reader = GroupReader(self._headwater_group[1], worker.device, **order)
        try:
            answer = self._headwater_receive(reader)
        finally:
            if "failure" in answer:
                self._headwater_group = None  # the sender's next operation fails at once
        return answer

    def _headwater_receive(self, arriving: Arriving) -> dict[str, str]:
        self._headwater_load(weights_iterator=arriving.tensors())
        if arriving.failure:
            logger.warning("the weights are incomplete and need another update: %s", arriving.failure)
            return {"failure": arriving.failure}
        return {"checksum": arriving.checksum()}

    def _headwater_load(self, **source: Any) -> None:
        """Load weights from where vLLM's ``reload_weights`` says.

        On a CPU, vLLM packs the weights of a layer when it loads them. It does so again when they are reloaded, except
        for an output layer that shares its weights with the embedding: that one would keep the old ones.
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        try:
            worker.reload_weights(**source)
        except BaseException:
            self._headwater_finish(model)
            raise
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and weight is not None and weight.dim() == 2 and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()  # the copies of slots, for others on this GPU

    def _headwater_finish(self, model: Any) -> None:
        """End a load that failed. vLLM would mix the layers that it has begun with those of the next load."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        worker: Any = self
        with set_current_vllm_config(worker.vllm_config):
            finalize_layerwise_reload(model, worker.vllm_config.model_config)
