"""Language models written out, as teaching repositories have them."""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional
_VOCAB, _SIZE, _BLOCK = 40, 32, 16


class CausalSelfAttention(nn.Module):
    """Attention of a small GPT."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(_SIZE, 3 * _SIZE)
        self.c_proj = nn.Linear(_SIZE, _SIZE)
        self.dropout = dropout
        self.register_buffer(
            "bias", torch.tril(torch.ones(_BLOCK, _BLOCK)).view(1, 1, _BLOCK, _BLOCK)
        )

    def forward(self, x: Any) -> Any:
        batch, length, size = x.size()
        q, k, v = (
            part.view(batch, length, 4, size // 4).transpose(1, 2)
            for part in self.c_attn(x).split(size, dim=2)
        )
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, size))


class Block(nn.Module):
    """A layer of a small GPT."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(_SIZE), CausalSelfAttention(dropout)
        self.ln_2 = nn.LayerNorm(_SIZE)
        self.mlp = nn.Sequential(
            nn.Linear(_SIZE, 2 * _SIZE), nn.GELU(), nn.Linear(2 * _SIZE, _SIZE), nn.Dropout(dropout)
        )

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT in the style of teaching repositories: tied weights, targets in the forward pass."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(_VOCAB, _SIZE), "wpe": nn.Embedding(_BLOCK, _SIZE), "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(dropout) for _ in range(2)]), "ln_f": nn.LayerNorm(_SIZE),
            }
        )  # fmt: skip
        self.lm_head = nn.Linear(_SIZE, _VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Any, targets: Any = None) -> Any:
        assert idx.size(1) <= _BLOCK
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float
    ) -> torch.optim.Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = (
            {"fused": True} if "fused" in inspect.signature(torch.optim.AdamW).parameters else {}
        )
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), **fused)


def _tokens(batch: int = 2, length: int = _BLOCK) -> Any:
    return torch.randint(0, _VOCAB, (batch, length))


@script(
    "nanoGPT: train.py (micro-batches, autocast context, clipping, cosine rate by hand, scaler)"
)
def nanogpt(wrap: Wrap) -> Any:
    gradient_accumulation_steps, grad_clip, max_iters = 2, 1.0, 5
    model = GPT(dropout=0.1)
    optimizer = model.configure_optimizers(1e-1, 6e-4)
    ctx = torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def get_lr(it: int) -> float:
        if it < 2:
            return 6e-4 * (it + 1) / 3
        ratio = (it - 2) / (max_iters - 2)
        return 6e-5 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (6e-4 - 6e-5)

    @wrap
    def train_step(batches: Any) -> Any:
        for x, y in batches:
            with ctx:
                logits, loss = model(x, y)
                loss = loss / gradient_accumulation_steps
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    history = []
    for iter_num in range(max_iters):
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(iter_num)
        batches = [(_tokens(), _tokens()) for _ in range(gradient_accumulation_steps)]
        history.append(train_step(batches).item() * gradient_accumulation_steps)
    return history, model, optimizer


@script("minGPT: trainer.py (a Trainer class with callbacks and attributes that it counts)")
def mingpt_trainer(wrap: Wrap) -> Any:
    class Trainer:
        def __init__(self, config: Any, model: Any) -> None:
            self.config, self.model = config, model
            self.optimizer = None
            self.callbacks: dict[str, list[Any]] = {"on_batch_end": []}
            self.device = "cpu"
            self.iter_num, self.iter_time, self.iter_dt = 0, 0.0, 0.0

        def trigger_callbacks(self, event: str) -> None:
            for callback in self.callbacks.get(event, []):
                callback(self)

        def step(self, x: Any, y: Any) -> Any:
            logits, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()

        def run(self, batches: Any) -> None:
            self.optimizer = self.model.configure_optimizers(0.1, self.config.learning_rate)
            self.model.train()
            step = wrap(self.step)
            for x, y in batches:
                step(x, y)
                self.trigger_callbacks("on_batch_end")
                self.iter_num += 1

    history: list[float] = []
    trainer = Trainer(SimpleNamespace(grad_norm_clip=1.0, learning_rate=3e-4), GPT(0.1))
    trainer.callbacks["on_batch_end"].append(lambda t: history.append((t.iter_num, t.loss.item())))
    trainer.run([(_tokens(), _tokens()) for _ in range(4)])
    return history, trainer.model, trainer.optimizer


@script("Let's build GPT: bigram model and a loop with evaluation under no_grad")
def bigram_gpt(wrap: Wrap) -> Any:
    class Bigram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_embedding_table = nn.Embedding(_VOCAB, _VOCAB)

        def forward(self, idx: Any, targets: Any) -> Any:
            logits = self.token_embedding_table(idx)
            batch, length, channels = logits.shape
            return functional.cross_entropy(
                logits.view(batch * length, channels), targets.view(batch * length)
            )

        def generate(self, idx: Any, count: int) -> Any:
            for _ in range(count):
                probs = functional.softmax(self.token_embedding_table(idx)[:, -1, :], dim=-1)
                idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
            return idx

    model = Bigram()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @wrap
    def train_step(xb: Any, yb: Any) -> Any:
        loss = model(xb, yb)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    history = []
    for index in range(6):
        if index % 3 == 0:
            with torch.no_grad():
                model.eval()
                history.append(model(_tokens(), _tokens()).item())
                model.train()
        history.append(train_step(_tokens(), _tokens()).item())
    return history, model, optimizer, model.generate(torch.zeros((1, 1), dtype=torch.long), 5)


@script(
    "llama2.c and torchtitan: RMSNorm, rotary embeddings, grouped queries, SwiGLU, warm-up by LambdaLR, chunked loss"
)
def llama_written_out(wrap: Wrap) -> Any:
    heads, kv_heads, head = 4, 2, 8

    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(_SIZE))

        def forward(self, x: Any) -> Any:
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
                x
            ) * self.weight

    def rotate(x: Any, freqs: Any) -> Any:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs[None, :, None]).flatten(3).type_as(x)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq, self.wo = (
                nn.Linear(_SIZE, heads * head, bias=False),
                nn.Linear(heads * head, _SIZE, bias=False),
            )
            self.wk, self.wv = (nn.Linear(_SIZE, kv_heads * head, bias=False) for _ in range(2))
            self.w1, self.w3 = (nn.Linear(_SIZE, 48, bias=False) for _ in range(2))
            self.w2 = nn.Linear(48, _SIZE, bias=False)
            self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

        def forward(self, x: Any, freqs: Any) -> Any:
            batch, length, _ = x.shape
            y = self.attention_norm(x)
            q = rotate(self.wq(y).view(batch, length, heads, head), freqs)
            k = rotate(self.wk(y).view(batch, length, kv_heads, head), freqs)
            v = self.wv(y).view(batch, length, kv_heads, head)
            k, v = (torch.repeat_interleave(part, heads // kv_heads, dim=2) for part in (k, v))
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.wo(y.transpose(1, 2).reshape(batch, length, -1))
            y = self.ffn_norm(x)
            return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings, self.norm = nn.Embedding(_VOCAB, _SIZE), RMSNorm()
            self.layers = nn.ModuleList([Layer() for _ in range(2)])
            self.output = nn.Linear(_SIZE, _VOCAB, bias=False)
            freqs = 1.0 / (10000.0 ** (torch.arange(0, head, 2).float() / head))
            angles = torch.outer(torch.arange(_BLOCK), freqs)
            self.register_buffer(
                "freqs", torch.polar(torch.ones_like(angles), angles), persistent=False
            )

        def forward(self, tokens: Any) -> Any:
            h = self.tok_embeddings(tokens)
            for layer in self.layers:
                h = layer(h, self.freqs[: tokens.shape[1]])
            return self.norm(h)

    model = Llama()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    @wrap
    def train_step(tokens: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        hidden = model(tokens)
        losses = [
            functional.cross_entropy(
                model.output(part).flatten(0, 1).float(), target.flatten(), reduction="sum"
            )
            for part, target in zip(hidden.chunk(2, dim=1), labels.chunk(2, dim=1), strict=True)
        ]
        loss = sum(losses) / labels.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        scheduler.step()
        return loss, norm

    return [train_step(_tokens(), _tokens()) for _ in range(4)], model, optimizer, scheduler


@script(
    "Switch Transformer: experts by top-1 routing, with capacity by masks, and an auxiliary loss"
)
def mixture_of_experts(wrap: Wrap) -> Any:
    experts, size = 4, 16

    class MoE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(size, experts, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, size))
                for _ in range(experts)
            )

        def forward(self, x: Any) -> Any:
            probs = self.gate(x).softmax(dim=-1)
            weights, chosen = probs.topk(2, dim=-1)
            weights = weights / weights.sum(dim=-1, keepdim=True)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                share = (weights * (chosen == index)).sum(dim=-1, keepdim=True)
                out = out + share * expert(x)
            load = functional.one_hot(chosen[..., 0], experts).float().mean(dim=0)
            return out, experts * (load * probs.mean(dim=0)).sum()

    model = nn.ModuleDict(
        {"embed": nn.Embedding(_VOCAB, size), "moe": MoE(), "head": nn.Linear(size, _VOCAB)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @wrap
    def train_step(tokens: Any, targets: Any) -> Any:
        hidden = model["embed"](tokens)
        mixed, aux = model["moe"](hidden)
        loss = functional.cross_entropy(model["head"](hidden + mixed), targets) + 0.01 * aux
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, aux

    return (
        [train_step(_tokens().flatten(), _tokens().flatten()) for _ in range(4)],
        model,
        optimizer,
    )


@script(
    "Mixtral as transformers first had it: tokens gathered by expert with torch.where and index_add_"
)
def mixture_of_experts_gathered(wrap: Wrap) -> Any:
    experts, size = 3, 16
    gate = nn.Linear(size, experts, bias=False)
    mlps = nn.ModuleList(nn.Linear(size, size) for _ in range(experts))
    optimizer = torch.optim.SGD([*gate.parameters(), *mlps.parameters()], lr=0.1)

    @wrap
    def train_step(hidden: Any, target: Any) -> Any:
        weights, chosen = torch.topk(functional.softmax(gate(hidden), dim=1), 2, dim=-1)
        mask = functional.one_hot(chosen, experts).permute(2, 1, 0)
        out = torch.zeros_like(hidden)
        for index in range(experts):
            place, token = torch.where(mask[index])
            out.index_add_(0, token, mlps[index](hidden[token]) * weights[token, place, None])
        loss = functional.mse_loss(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(6, size), torch.randn(6, size)) for _ in range(4)],
        gate,
        mlps,
        optimizer,
    )


@script("word2vec: skip-gram with negative samples")
def word2vec(wrap: Wrap) -> Any:
    class SkipGram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.v = (
                nn.Embedding(_VOCAB, 8, sparse=False),
                nn.Embedding(_VOCAB, 8, sparse=False),
            )
            nn.init.uniform_(self.u.weight, -0.5 / 8, 0.5 / 8)

        def forward(self, pos_u: Any, pos_v: Any, neg_v: Any) -> Any:
            emb_u, emb_v, emb_neg = self.u(pos_u), self.v(pos_v), self.v(neg_v)
            score = functional.logsigmoid(
                torch.clamp(torch.sum(emb_u * emb_v, dim=1), max=10, min=-10)
            )
            neg = torch.clamp(torch.bmm(emb_neg, emb_u.unsqueeze(2)).squeeze(), max=10, min=-10)
            return -torch.mean(score + torch.sum(functional.logsigmoid(-neg), dim=1))

    model = SkipGram()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    noise = torch.rand(_VOCAB)

    @wrap
    def train_step(pos_u: Any, pos_v: Any) -> Any:
        neg_v = torch.multinomial(noise, 8 * 5, replacement=True).view(8, 5)
        optimizer.zero_grad()
        loss = model(pos_u, pos_v, neg_v)
        loss.backward()
        optimizer.step()
        return loss.item()

    return (
        [
            train_step(torch.randint(0, _VOCAB, (8,)), torch.randint(0, _VOCAB, (8,)))
            for _ in range(4)
        ],
        model,
        optimizer,
    )


@script("The Annotated Transformer: Noam schedule, label smoothing, encoder and decoder")
def annotated_transformer(wrap: Wrap) -> Any:
    class LabelSmoothing(nn.Module):
        def __init__(self, size: int, padding_idx: int, smoothing: float) -> None:
            super().__init__()
            self.criterion = nn.KLDivLoss(reduction="sum")
            self.padding_idx, self.smoothing, self.size = padding_idx, smoothing, size

        def forward(self, x: Any, target: Any) -> Any:
            true_dist = x.data.clone()
            true_dist.fill_(self.smoothing / (self.size - 2))
            true_dist.scatter_(1, target.data.unsqueeze(1), 1 - self.smoothing)
            true_dist[:, self.padding_idx] = 0
            true_dist = true_dist.masked_fill((target == self.padding_idx).unsqueeze(1), 0.0)
            return self.criterion(x, true_dist.clone().detach())

    embed = nn.Embedding(_VOCAB, _SIZE, padding_idx=0)
    transformer = nn.Transformer(_SIZE, 4, 1, 1, 48, dropout=0.1, batch_first=True)
    generator = nn.Linear(_SIZE, _VOCAB)
    modules = nn.ModuleList([embed, transformer, generator])
    criterion = LabelSmoothing(_VOCAB, 0, 0.1)
    optimizer = torch.optim.Adam(modules.parameters(), lr=0.5, betas=(0.9, 0.98), eps=1e-9)

    def rate(step: int) -> float:
        step = max(step, 1)
        return _SIZE ** (-0.5) * min(step ** (-0.5), step * 10 ** (-1.5))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=rate)

    @wrap
    def run_batch(src: Any, tgt: Any) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1) - 1, dtype=torch.bool)
        out = transformer(
            embed(src) * math.sqrt(_SIZE), embed(tgt[:, :-1]) * math.sqrt(_SIZE), tgt_mask=causal,
            src_key_padding_mask=src == 0, tgt_key_padding_mask=tgt[:, :-1] == 0, memory_key_padding_mask=src == 0,
        )  # fmt: skip
        log_probs = functional.log_softmax(generator(out), dim=-1)
        labels = tgt[:, 1:].contiguous().view(-1)
        ntokens = (labels != 0).data.sum()
        loss = criterion(log_probs.contiguous().view(-1, _VOCAB), labels) / ntokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        return loss.data * ntokens

    def padded(length: int) -> Any:
        tokens = torch.randint(1, _VOCAB, (2, length))
        tokens[1, -2:] = 0
        return tokens

    return [run_batch(padded(7), padded(8)) for _ in range(4)], modules, optimizer, scheduler


@script("LoRA written by hand: frozen base, low-rank factors, merged at the end")
def lora_by_hand(wrap: Wrap) -> Any:
    class LoRALinear(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.lora_a = nn.Parameter(torch.randn(4, base.in_features) / 4)
            self.lora_b = nn.Parameter(torch.zeros(base.out_features, 4))
            self.dropout = nn.Dropout(0.05)

        def forward(self, x: Any) -> Any:
            return self.base(x) + (self.dropout(x) @ self.lora_a.T @ self.lora_b.T) * 2.0

    model = GPT().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRALinear(block.attn.c_attn)
        block.mlp[0] = LoRALinear(block.mlp[0])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return [train_step(_tokens(), _tokens()) for _ in range(4)], model, optimizer


@script(
    "Direct preference optimization: a frozen reference, log-probabilities of chosen and rejected answers"
)
def preference_optimization(wrap: Wrap) -> Any:
    policy, reference = GPT(), GPT().eval().requires_grad_(False)
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)

    def logps(model: Any, tokens: Any, mask: Any) -> Any:
        hidden = model.transformer.drop(
            model.transformer.wte(tokens) + model.transformer.wpe.weight[: tokens.size(1)]
        )
        for block in model.transformer.h:
            hidden = block(hidden)
        logits = model.lm_head(model.transformer.ln_f(hidden))[:, :-1]
        picked = torch.gather(logits.log_softmax(-1), 2, tokens[:, 1:].unsqueeze(2)).squeeze(2)
        return (picked * mask[:, 1:]).sum(-1)

    @wrap
    def train_step(chosen: Any, rejected: Any, mask: Any) -> Any:
        ours = logps(policy, torch.cat([chosen, rejected]), torch.cat([mask, mask]))
        with torch.no_grad():
            theirs = logps(reference, torch.cat([chosen, rejected]), torch.cat([mask, mask]))
        rewards = 0.1 * (ours - theirs)
        margin = rewards[: len(chosen)] - rewards[len(chosen) :]
        loss = -functional.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, margin.detach(), (margin > 0).float().mean()

    mask = torch.ones(2, _BLOCK)
    return [train_step(_tokens(), _tokens(), mask) for _ in range(4)], policy, optimizer


@script("Knowledge distillation: soft targets of a teacher at a temperature")
def distillation(wrap: Wrap) -> Any:
    teacher, student = GPT().eval(), GPT(dropout=0.1)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    temperature, weight = 2.0, 0.25

    @wrap
    def train_step(inputs: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits, _ = teacher(inputs, labels)
        student_logits, label_loss = student(inputs, labels)
        soft_targets = functional.softmax(teacher_logits / temperature, dim=-1)
        soft_prob = functional.log_softmax(student_logits / temperature, dim=-1)
        soft_loss = (
            torch.sum(soft_targets * (soft_targets.log() - soft_prob))
            / soft_prob.size()[0]
            * (temperature**2)
        )
        loss = weight * soft_loss + (1 - weight) * label_loss
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(_tokens(), _tokens()) for _ in range(4)], student, optimizer


@script("A loop that trains in bfloat16 with masters in float32 kept by hand")
def master_weights(wrap: Wrap) -> Any:
    model = GPT().bfloat16()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        _, loss = model(x, y)
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        return loss

    return [train_step(_tokens(), _tokens()) for _ in range(4)], model, masters, optimizer


@script(
    "Gradient accumulation across calls, with an update every second micro-batch and `no_sync`-like contexts"
)
def accumulation_across_calls(wrap: Wrap) -> Any:
    model = GPT(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @wrap
    def train_step(x: Any, y: Any, is_last: bool) -> Any:
        with nullcontext():
            _, loss = model(x, y)
            (loss / 2).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return (
        [train_step(_tokens(), _tokens(), index % 2 == 1) for index in range(6)],
        model,
        optimizer,
    )


@script(
    "Sequence tagging with a BiLSTM and a CRF (PyTorch tutorials, the batched forward algorithm)"
)
def bilstm_crf(wrap: Wrap) -> Any:
    tags, size = 4, 8

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(_VOCAB, size)
            self.lstm = nn.LSTM(size, size // 2, bidirectional=True, batch_first=True)
            self.hidden2tag = nn.Linear(size, tags)
            self.transitions = nn.Parameter(torch.randn(tags, tags))

        def forward(self, sentence: Any, labels: Any) -> Any:
            features = self.hidden2tag(self.lstm(self.embed(sentence))[0])
            alpha = features[:, 0]
            gold = features[:, 0].gather(1, labels[:, :1]).squeeze(1)
            for index in range(1, features.size(1)):
                alpha = (
                    torch.logsumexp(alpha.unsqueeze(2) + self.transitions, dim=1)
                    + features[:, index]
                )
                gold = gold + self.transitions[labels[:, index - 1], labels[:, index]]
                gold = gold + features[:, index].gather(1, labels[:, index : index + 1]).squeeze(1)
            return (torch.logsumexp(alpha, dim=1) - gold).mean()

    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4)

    @wrap
    def train_step(sentence: Any, labels: Any) -> Any:
        model.zero_grad()
        loss = model(sentence, labels)
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(_tokens(3, 6), torch.randint(0, tags, (3, 6))) for _ in range(4)],
        model,
        optimizer,
    )
