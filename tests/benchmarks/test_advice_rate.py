from benchmarks.advice_rate import advised


def test_advice_is_read_in_the_order_of_a_message_with_and_without_numbers():
    message = (
        "update_actor: out of device memory at 0.00153 of 0.00136 GiB (aten.mm.default): params 0.001 GiB. Most of it is params: "
        "set actor_rollout_ref.actor.fsdp_config.grad_offload=true. Also: lower actor_rollout_ref.actor.optim.bucket_megabytes "
        "to 41.8 (now 64; the fullest micro-batch has 192 tokens); lower critic.optim.bucket_megabytes (now 64); lower a.b."
    )
    assert advised(message) == [
        ("set", "actor_rollout_ref.actor.fsdp_config.grad_offload", "true"),
        ("lower", "actor_rollout_ref.actor.optim.bucket_megabytes", "41.8"),
        ("lower", "critic.optim.bucket_megabytes", None),
        ("lower", "a.b", None),
    ]
