"""LoRA adapters of peft on a small GPT-2 from its configuration, eagerly and by plan."""

import peft
import torch
import transformers

import roam


def train(by_plan: bool) -> list[float]:
    """The losses of some steps."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        vocab_size=256,
        n_positions=64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    adapters = peft.LoraConfig(
        r=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def train_step(tokens):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss

    if by_plan:
        train_step = roam.compile(train_step)

    losses = []
    for _ in range(5):
        losses.append(train_step(torch.randint(256, (2, 32))).item())
    return losses


if __name__ == "__main__":
    eager, planned = train(by_plan=False), train(by_plan=True)
    print("eager  ", *(f"{loss:.6f}" for loss in eager))
    print("by plan", *(f"{loss:.6f}" for loss in planned))
    assert eager == planned
