#!/usr/bin/env bash
# The published setting on verl: GRPO on Qwen2.5-1.5B, FSDP2 against vLLM, on the GPUs of one machine.
# usage: experiments/grpo/verl/run.sh none|all [verl overrides ...]      data: DATA=DIR with train.parquet, test.parquet
set -euo pipefail
arm=$1; shift
export PYTHONPATH="$(cd "$(dirname "$0")" && pwd)${PYTHONPATH:+:$PYTHONPATH}"
# What vLLM 0.32 does by default on CUDA. Measure it instead: tripoint fingerprint vllm --like MODEL --save vllm.toml
export TRIPOINT_TARGET="${TRIPOINT_TARGET:-vllm@0.32/cuda/compiled/tp1}"
external=null
[ "$arm" = all ] && external=align_actor

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=false \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-1.5B}" \
  actor_rollout_ref.model.external_lib="$external" \
  actor_rollout_ref.model.use_liger=false \
  actor_rollout_ref.model.use_fused_kernels=false \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.use_kl_loss=false \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.enforce_eager=false \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.calculate_log_probs=true \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  data.train_files="${DATA:?a directory with train.parquet and test.parquet}/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=128 \
  data.max_prompt_length=1024 \
  data.max_response_length=3072 \
  trainer.n_gpus_per_node="${GPUS:-8}" \
  trainer.nnodes=1 \
  trainer.project_name=tripoint \
  trainer.experiment_name="qwen2.5-1.5b-$arm" \
  trainer.total_epochs=10 \
  +ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH="$PYTHONPATH" \
  +ray_kwargs.ray_init.runtime_env.env_vars.TRIPOINT_TARGET="'$TRIPOINT_TARGET'" \
  "$@"
