"""Reinforcement learning: acting outside of the step, learning inside; environments are made of
random numbers.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional
_STATE, _ACTIONS = 4, 2


def _mlp(after: int, before: int = _STATE) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, 16), nn.Tanh(), nn.Linear(16, after))


def _returns(rewards: list[float]) -> Any:
    total, found = 0.0, []
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        found.insert(0, total)
    values = torch.tensor(found)
    return (values - values.mean()) / (values.std() + 1e-6)


@script("PyTorch tutorials: DQN (replay, mask of final states, soft update of the target)")
def dqn(wrap: Wrap) -> Any:
    policy_net = nn.Sequential(nn.Linear(_STATE, 16), nn.ReLU(), nn.Linear(16, _ACTIONS))
    target_net = copy.deepcopy(policy_net)
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
    memory: deque[Any] = deque(maxlen=50)

    @wrap
    def optimize_model(state: Any, action: Any, reward: Any, next_state: Any, is_final: Any) -> Any:
        state_action_values = policy_net(state).gather(1, action)
        with torch.no_grad():
            next_values = target_net(next_state).max(1).values.masked_fill(is_final, 0.0)
        expected = (next_values * 0.99) + reward
        loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        target, policy = target_net.state_dict(), policy_net.state_dict()
        for key in policy:
            target[key] = policy[key] * 0.005 + target[key] * (1 - 0.005)
        target_net.load_state_dict(target)
        return loss

    history = []
    for step in range(12):
        state = torch.randn(1, _STATE)
        with torch.no_grad():
            action = (
                policy_net(state).max(1).indices.view(1, 1)
                if random.random() > 0.3
                else torch.randint(0, 2, (1, 1))
            )
        memory.append(
            (state, action, torch.rand(1), torch.randn(1, _STATE), torch.tensor([step % 5 == 0]))
        )
        if len(memory) >= 8:
            history.append(
                optimize_model(
                    *(torch.cat(part) for part in zip(*random.sample(memory, 8), strict=True))
                )
            )
    return history, policy_net, target_net, optimizer


@script(
    "DQN as the tutorial has it: values of the states that are not final, picked by a boolean mask"
)
def dqn_boolean_mask(wrap: Wrap) -> Any:
    policy_net = _mlp(_ACTIONS)
    target_net = copy.deepcopy(policy_net)
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3)

    @wrap
    def optimize_model(
        state: Any, action: Any, reward: Any, non_final_next: Any, non_final_mask: Any
    ) -> Any:
        values = policy_net(state).gather(1, action)
        next_values = torch.zeros(8)
        with torch.no_grad():
            next_values[non_final_mask] = target_net(non_final_next).max(1).values
        loss = functional.smooth_l1_loss(values, (next_values * 0.99 + reward).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    history = []
    for _ in range(3):
        mask = torch.tensor([True] * 6 + [False] * 2)
        history.append(
            optimize_model(
                torch.randn(8, _STATE),
                torch.randint(0, 2, (8, 1)),
                torch.rand(8),
                torch.randn(6, _STATE),
                mask,
            )
        )
    return history, policy_net, optimizer


@script("PyTorch examples: REINFORCE")
def reinforce(wrap: Wrap) -> Any:
    policy = nn.Sequential(
        nn.Linear(_STATE, 16), nn.Dropout(p=0.6), nn.ReLU(), nn.Linear(16, _ACTIONS)
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    @wrap
    def finish_episode(states: Any, actions: Any, returns: Any) -> Any:
        log_probs = torch.distributions.Categorical(
            logits=policy(states), validate_args=False
        ).log_prob(actions)
        policy_loss = (-log_probs * returns).sum()
        optimizer.zero_grad()
        policy_loss.backward()
        optimizer.step()
        return policy_loss

    history = []
    for _ in range(3):
        states, rewards = torch.randn(10, _STATE), [random.random() for _ in range(10)]
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=policy(states)).sample()
        history.append(finish_episode(states, actions, _returns(rewards)))
    return history, policy, optimizer


@script("PyTorch examples: actor-critic (losses of an episode in lists, a softmax policy)")
def actor_critic(wrap: Wrap) -> Any:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.action_head, self.value_head = (
                nn.Linear(_STATE, 16),
                nn.Linear(16, _ACTIONS),
                nn.Linear(16, 1),
            )

        def forward(self, x: Any) -> Any:
            x = functional.relu(self.affine1(x))
            return functional.softmax(self.action_head(x), dim=-1), self.value_head(x)

    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)

    @wrap
    def finish_episode(states: Any, actions: Any, returns: Any) -> Any:
        policy_losses, value_losses = [], []
        for state, action, result in zip(states, actions, returns, strict=True):
            probs, value = model(state)
            log_prob = torch.distributions.Categorical(probs, validate_args=False).log_prob(action)
            advantage = result - value.detach()
            policy_losses.append(-log_prob * advantage)
            value_losses.append(functional.smooth_l1_loss(value, result.unsqueeze(0)))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        return loss

    history = []
    for _ in range(3):
        states = torch.randn(6, _STATE)
        history.append(
            finish_episode(
                states, torch.randint(0, 2, (6,)), _returns([random.random() for _ in range(6)])
            )
        )
    return history, model, optimizer


@script("A2C: advantages by bootstrapping, entropy bonus, one loss, RMSprop")
def a2c(wrap: Wrap) -> Any:
    actor, critic = _mlp(_ACTIONS), _mlp(1)
    params = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.RMSprop(params, lr=7e-4, eps=1e-5, alpha=0.99)

    @wrap
    def update(states: Any, actions: Any, rewards: Any, masks: Any, last: Any) -> Any:
        with torch.no_grad():
            value, returns = critic(last).squeeze(-1), []
            for step in reversed(range(len(rewards))):
                value = rewards[step] + 0.99 * value * masks[step]
                returns.insert(0, value)
            returns = torch.stack(returns)
        dist = torch.distributions.Categorical(logits=actor(states), validate_args=False)
        values = critic(states).squeeze(-1)
        advantages = returns - values
        loss = (
            -(dist.log_prob(actions) * advantages.detach()).mean()
            + 0.5 * advantages.pow(2).mean()
            - 0.01 * dist.entropy().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        return loss

    def rollout() -> Any:
        return (
            torch.randn(5, 3, _STATE),
            torch.randint(0, 2, (5, 3)),
            torch.rand(5, 3),
            (torch.rand(5, 3) > 0.1).float(),
            torch.randn(3, _STATE),
        )

    return [update(*rollout()) for _ in range(4)], actor, critic, optimizer


@script("CleanRL: PPO (minibatches of shuffled indices, clipped losses, annealed rate)")
def ppo(wrap: Wrap) -> Any:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic, self.actor = _mlp(1), _mlp(_ACTIONS)

        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            probs = torch.distributions.Categorical(logits=self.actor(x), validate_args=False)
            if action is None:
                action = probs.sample()
            return action, probs.log_prob(action), probs.entropy(), self.critic(x)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)

    @wrap
    def update(
        obs: Any, actions: Any, logprobs: Any, advantages: Any, returns: Any, values: Any
    ) -> Any:
        _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions.long())
        logratio = newlogprob - logprobs
        ratio = logratio.exp()
        with torch.no_grad():
            approx_kl = ((ratio - 1) - logratio).mean()
            clipfrac = ((ratio - 1.0).abs() > 0.2).float().mean().item()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        pg_loss = torch.max(
            -advantages * ratio, -advantages * torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
        ).mean()
        newvalue = newvalue.view(-1)
        clipped = values + torch.clamp(newvalue - values, -0.2, 0.2)
        v_loss = 0.5 * torch.max((newvalue - returns) ** 2, (clipped - returns) ** 2).mean()
        loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss, approx_kl, clipfrac

    history = []
    for iteration in range(2):
        optimizer.param_groups[0]["lr"] = (1.0 - iteration / 2) * 2.5e-4
        obs = torch.randn(16, _STATE)
        with torch.no_grad():
            actions, logprobs, _, values = agent.get_action_and_value(obs)
        advantages = torch.randn(16)
        for start in range(0, 16, 8):
            index = torch.randperm(16)[start : start + 8]
            batch = (
                obs[index],
                actions[index],
                logprobs[index],
                advantages[index],
                (advantages + values[:, 0])[index],
                values[index, 0],
            )
            history.append(update(*batch))
    return history, agent, optimizer


@script(
    "CleanRL: SAC (reparametrized tanh policy, twin critics, learned temperature, soft targets)"
)
def sac(wrap: Wrap) -> Any:
    actor, q1, q2 = _mlp(4), _mlp(1, _STATE + 2), _mlp(1, _STATE + 2)
    q1_target, q2_target = copy.deepcopy(q1), copy.deepcopy(q2)
    q_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    log_alpha = torch.zeros(1, requires_grad=True)
    a_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)

    def get_action(x: Any) -> Any:
        mean, log_std = actor(x).chunk(2, dim=-1)
        log_std = -5 + 0.5 * (2 + 5) * (torch.tanh(log_std) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(1 - y_t.pow(2) + 1e-6)
        return y_t, log_prob.sum(1, keepdim=True)

    @wrap
    def update(obs: Any, actions: Any, rewards: Any, next_obs: Any, dones: Any) -> Any:
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            next_actions, next_log_pi = get_action(next_obs)
            following = torch.cat([next_obs, next_actions], 1)
            lowest = torch.min(q1_target(following), q2_target(following)) - alpha * next_log_pi
            wanted = rewards + (1 - dones) * 0.99 * lowest.view(-1)
        now = torch.cat([obs, actions], 1)
        q_loss = functional.mse_loss(q1(now).view(-1), wanted) + functional.mse_loss(
            q2(now).view(-1), wanted
        )
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()
        pi, log_pi = get_action(obs)
        tried = torch.cat([obs, pi], 1)
        actor_loss = ((alpha * log_pi) - torch.min(q1(tried), q2(tried))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        alpha_loss = (-log_alpha.exp() * (log_pi.detach() - 2)).mean()
        a_optimizer.zero_grad()
        alpha_loss.backward()
        a_optimizer.step()
        for net, target in ((q1, q1_target), (q2, q2_target)):
            for param, mean in zip(net.parameters(), target.parameters(), strict=True):
                mean.data.copy_(0.005 * param.data + (1 - 0.005) * mean.data)
        return q_loss, actor_loss, alpha_loss

    def batch() -> Any:
        return (
            torch.randn(8, _STATE),
            torch.rand(8, 2),
            torch.rand(8),
            torch.randn(8, _STATE),
            (torch.rand(8) < 0.1).float(),
        )

    history = [update(*batch()) for _ in range(4)]
    return history, actor, q1, q2, q1_target, log_alpha, q_optimizer, actor_optimizer, a_optimizer


@script("TD3: target smoothing by clipped noise, the policy every second step")
def td3(wrap: Wrap) -> Any:
    actor = nn.Sequential(nn.Linear(_STATE, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh())
    critic = nn.ModuleList([_mlp(1, _STATE + 2), _mlp(1, _STATE + 2)])
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-4)

    class Agent:
        def __init__(self) -> None:
            self.total_it = 0

        def train(
            self, state: Any, action: Any, next_state: Any, reward: Any, not_done: Any
        ) -> Any:
            self.total_it += 1
            with torch.no_grad():
                noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
                next_action = (actor_target(next_state) + noise).clamp(-1, 1)
                joined = torch.cat([next_state, next_action], 1)
                target_q = reward + not_done * 0.99 * torch.min(
                    critic_target[0](joined), critic_target[1](joined)
                )
            now = torch.cat([state, action], 1)
            critic_loss = sum(functional.mse_loss(one(now), target_q) for one in critic)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            if self.total_it % 2 == 0:
                actor_loss = -critic[0](torch.cat([state, actor(state)], 1)).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                for net, target in ((critic, critic_target), (actor, actor_target)):
                    for param, mean in zip(net.parameters(), target.parameters(), strict=True):
                        mean.data.copy_(0.005 * param.data + (1 - 0.005) * mean.data)
            return critic_loss

    agent = Agent()
    train = wrap(agent.train)

    def batch() -> Any:
        return (
            torch.randn(8, _STATE),
            torch.rand(8, 2),
            torch.randn(8, _STATE),
            torch.rand(8, 1),
            torch.ones(8, 1),
        )

    return (
        [train(*batch()) for _ in range(6)],
        actor,
        critic,
        actor_target,
        critic_target,
        agent.total_it,
        critic_optimizer,
    )
