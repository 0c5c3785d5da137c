"""Models on Megatron-Core: one rank's share of a GPTModel.

policy     the model that is trained and served      DDP wrapper, optimizer
critic     the same with a value head                DDP wrapper, optimizer
reference  the same, frozen                          neither
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from reef.config import Layout
from reef.options import OptimizerOptions
from reef.training import convert, device, optimizer
from reef.training.architecture import Architecture
from reef.training.experts import expert_settings, expert_tensor_ranks
from reef.training.layers import layer_spec
from reef.training.value_head import ValueHead
from reef.training.weights import WeightFiles

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Network:
    """One rank's share of a model."""

    architecture: Architecture
    module: Any  # GPTModel
    model: Any  # what is called: DDP around it, where it is trained
    optimizer: Any  # Megatron's ChainedOptimizer; None: it is not trained
    first_layer: int  # number of this stage's first layer in the whole model
    first_expert: int | None  # of this rank in each layer; None: experts are cut over tensor ranks, as all else
    places: Mapping[str, convert.Place]  # what of which Hugging Face tensor is where, by its name; the policy's alone


def join_ranks(rank: int, world_size: int, layout: Layout, rendezvous: Path, seed: int) -> None:
    """Make the process groups of this rank. They meet over a file, so that no port is opened for it."""
    device.install()
    store = torch._C._distributed_c10d.FileStore(str(rendezvous), world_size)
    dist.init_process_group(device.backend(), store=store, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=expert_tensor_ranks(layout),
    )
    torch.manual_seed(seed)  # Megatron seeds the device alone; checkpoints hold the CPU's random numbers too
    with device.megatron_calls():
        # Expert ranks get one seed, as data ranks do: a checkpoint holds the state of one of them. No expert draws.
        model_parallel_cuda_manual_seed(seed, ep_rank=0)


def leave_ranks() -> None:
    """End what `join_ranks` made; the process can join others afterwards."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(
    architecture: Architecture, layout: Layout, dtype: str, options: OptimizerOptions, weights: WeightFiles
) -> Network:
    """Build this rank's policy with its part of `weights`, and an optimizer for it. Call after `join_ranks`.

    Of `options` counts what is said of construction: the rest is each batch's own.
    """
    with device.megatron_calls():
        config = _model_config(architecture, layout, DTYPES[dtype], options)
        network = _train(_module(config, architecture, weights), config, architecture, options)
        names = dict(network.module.named_parameters())
        places = convert.places(architecture, names, network.first_layer, network.first_expert)
        return replace(network, places=places)


def build_critic(
    architecture: Architecture,
    layout: Layout,
    dtype: str,
    options: OptimizerOptions,
    weights: WeightFiles,
    freeze: Literal["none", "attention"],
) -> Network:
    """Build this rank's critic: a body with its part of `weights`, a value head of zeros, and an optimizer for both.

    Args:
        freeze: what of its body keeps the weights it has.
    """
    with device.megatron_calls():
        config = _model_config(architecture, layout, DTYPES[dtype], options)
        module = _module(config, architecture, weights, value_head=True)
        if freeze == "attention":
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not _is_attention(name))
        return _train(module, config, architecture, options)


def _is_attention(parameter: str) -> bool:
    """Transformer Engine keeps the norm before attention in the linear layer that follows it; it is none of it."""
    return ".self_attention." in parameter and not parameter.endswith("linear_qkv.layer_norm_weight")


def build_reference(
    architecture: Architecture, layout: Layout, dtype: str, options: OptimizerOptions, weights: WeightFiles
) -> Network:
    """Build this rank's part of a frozen model."""
    with device.megatron_calls():
        config = _model_config(architecture, layout, DTYPES[dtype], options)
        module = _module(config, architecture, weights)
        module.requires_grad_(False)
        module.eval()
        return _network(module, _wrapped(module, config), None, architecture)


def _module(
    config: TransformerConfig, architecture: Architecture, weights: WeightFiles, *, value_head: bool = False
) -> Any:
    module = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.context_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        rope_scaling=architecture.rope_factor is not None,
        rope_scaling_factor=architecture.rope_factor or 1.0,
        share_embeddings_and_output_weights=architecture.tied and not value_head,
    )
    if value_head and module.post_process:
        module.output_layer = ValueHead(config)
    _read(module, architecture, weights)
    module.to(device.current())
    return module


def _wrapped(module: Any, config: TransformerConfig) -> Any:
    return module if config.params_dtype is torch.float32 else Float16Module(config, module)


def _train(module: Any, config: TransformerConfig, architecture: Architecture, options: OptimizerOptions) -> Network:
    model = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=options.use_distributed_optimizer,
            overlap_grad_reduce=options.overlap_grad_reduce,
        ),
        module=_wrapped(module, config),
    )
    built = optimizer.build(model, config.params_dtype, options)
    config.finalize_model_grads_func = _finalize
    config.grad_scale_func = None
    if options.overlap_grad_reduce:
        config.no_sync_func = model.no_sync  # all microbatches but the last add up on their own rank
    return _network(module, model, built, architecture)


def _network(module: Any, model: Any, built: Any, architecture: Architecture) -> Network:
    return Network(architecture, module, model, built, _first_layer(module), _first_expert(architecture), {})


def packs(dtype: str) -> bool:
    """Whether the model takes sequences end to end: Transformer Engine's kernels for that know no float32."""
    return device.has_transformer_engine() and dtype == "bfloat16"


def _first_expert(architecture: Architecture) -> int | None:
    ranks: int = parallel_state.get_expert_model_parallel_world_size()
    if architecture.experts is None or ranks == 1:
        return None
    rank: int = parallel_state.get_expert_model_parallel_rank()
    return architecture.experts.num_experts // ranks * rank


def _first_layer(module: Any) -> int:
    number: int = module.decoder.layers[0].layer_number
    return number - 1


def _read(module: Any, architecture: Architecture, weights: WeightFiles) -> None:
    """Fill this rank's part of a model from files. A value head, of which they know nothing, stays as it is."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    skip = "output_layer." if _value_head(module) is not None else None
    convert.load(
        module, architecture, _first_layer(module), weights.read, rank, size, _first_expert(architecture), skip
    )


def _value_head(module: Any) -> ValueHead | None:
    head = getattr(module, "output_layer", None)
    return head if isinstance(head, ValueHead) else None


def load_weights(network: Network, weights: WeightFiles) -> None:
    """Replace this rank's weights, and with them the float32 copies that a bfloat16 optimizer steps; nothing else.

    A critic's value head is set to zeros, as it was at first.
    """
    _read(network.module, network.architecture, weights)
    if (head := _value_head(network.module)) is not None:
        head.forget()
    with device.megatron_calls():
        network.optimizer.reload_model_params()


def _model_config(
    architecture: Architecture, layout: Layout, dtype: torch.dtype, options: OptimizerOptions
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence_parallel,
        recompute_granularity=options.recompute_granularity,
        recompute_method=options.recompute_method,
        recompute_num_layers=options.recompute_num_layers,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Weights are loaded at once. Megatron's initialisation must still pass over them, since it also marks which
        # are cut over tensor ranks; without the marks the gradient norm would miss all ranks but the first.
        perform_initialization=True,
        use_cpu_initialization=True,
        init_method=_leave_as_it_is,
        output_layer_init_method=_leave_as_it_is,
        calculate_per_token_loss=True,  # gradients are summed over microbatches and ranks; see `_finalize`
        # Microbatches differ in length, so that stages must tell each other the shape.
        variable_seq_lengths=layout.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # variable lengths insist on it, with experts or without
        # Fused kernels come with Transformer Engine and Apex; the local spec has none.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
        **expert_settings(architecture, layout),
    )


def _leave_as_it_is(weight: torch.Tensor) -> None:
    """An initialisation that draws nothing."""


def _finalize(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Add up gradients over ranks and leave them a sum: a method's token weights are the whole batch's already."""
    finalize_model_grads(model, None, **kwargs)


def zero_gradients(network: Network) -> None:
    """Forget the gradients of the last step."""
    with device.megatron_calls():
        network.model.zero_grad_buffer()
        network.optimizer.zero_grad()
