"""Runs in vLLM's worker processes (``--worker-extension-cls headwater_vllm_worker.Worker``).

Headwater is not installed in that environment, so this file uses only what vLLM has.
"""

from __future__ import annotations

from typing import Any


class Worker:
    """Methods in addition to those of vLLM's worker, whose class it becomes a base of."""

    def headwater_describe(self) -> dict[str, Any]:
        """The settings that ``/server_info`` tells too, which takes half a minute for other things."""
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
        }

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
