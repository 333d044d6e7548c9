"""Runs in vLLM's worker processes (``--worker-extension-cls headwater_vllm_worker.Worker``).

Headwater is not installed in that environment, so this file uses only what vLLM has.
"""

from __future__ import annotations

from typing import Any


class Worker:
    """Methods in addition to those of vLLM's worker, whose class it becomes a base of."""

    def headwater_describe(self) -> dict[str, Any]:
        """The settings that ``/server_info`` tells too, which takes half a minute for other things."""
        from vllm import envs

        config = self.vllm_config  # type: ignore[attr-defined]
        model = config.model_config
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
            "parallel_config": {"worker_extension_cls": config.parallel_config.worker_extension_cls},
            "lora_config": {"max_lora_rank": config.lora_config.max_lora_rank} if config.lora_config else None,
            "loads_adapters": bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING),
        }

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

    def headwater_reload(self, folder: str) -> None:
        """Load the safetensors files of a folder.

        On a CPU, vLLM packs the weights of a layer when it loads them. It does so again when they are reloaded, except
        for an output layer that shares its weights with the embedding: that one would keep the old ones.
        """
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        for layer in worker.model_runner.get_model().modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and weight is not None and weight.dim() == 2 and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
