"""Graph networks of PyTorch Geometric, and message passing written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


def _graph() -> tuple[Any, Any, Any, Any]:
    return (
        torch.randn(20, 8),
        torch.randint(0, 20, (2, 60)),
        torch.randint(0, 3, (20,)),
        torch.rand(20) < 0.6,
    )


def _node_classification(wrap: Wrap, make: Any) -> Any:
    x, edge_index, y, train_mask = _graph()
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    @wrap
    def train() -> Any:
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = functional.cross_entropy(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss

    history = []
    for _ in range(4):
        history.append(float(train()))
        model.eval()
        with torch.no_grad():
            history.append(float((model(x, edge_index).argmax(-1) == y).float().mean()))
    return history, model, optimizer


@script("PyTorch Geometric examples: GCN (loss on a boolean mask of nodes)", "torch_geometric")
def gcn(wrap: Wrap) -> Any:
    from torch_geometric.nn import GCNConv

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = GCNConv(8, 16), GCNConv(16, 3)

        def forward(self, x: Any, edge_index: Any) -> Any:
            x = functional.dropout(x, p=0.5, training=self.training)
            x = self.conv1(x, edge_index).relu()
            x = functional.dropout(x, p=0.5, training=self.training)
            return self.conv2(x, edge_index)

    return _node_classification(wrap, GCN)


@script("PyTorch Geometric examples: GAT", "torch_geometric")
def gat(wrap: Wrap) -> Any:
    from torch_geometric.nn import GATConv

    class GAT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = (
                GATConv(8, 4, heads=2, dropout=0.6),
                GATConv(8, 3, heads=1, concat=False, dropout=0.6),
            )

        def forward(self, x: Any, edge_index: Any) -> Any:
            x = functional.elu(self.conv1(functional.dropout(x, 0.6, self.training), edge_index))
            return self.conv2(functional.dropout(x, 0.6, self.training), edge_index)

    return _node_classification(wrap, GAT)


@script("PyTorch Geometric examples: GIN on batches of graphs", "torch_geometric")
def gin_batches(wrap: Wrap) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GINConv, global_add_pool

    class GIN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(
                GINConv(
                    nn.Sequential(
                        nn.Linear(n, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)
                    ),
                    train_eps=True,
                )
                for n in (8, 16)
            )
            self.head = nn.Linear(16, 2)

        def forward(self, x: Any, edge_index: Any, batch: Any, batch_size: int) -> Any:
            for conv in self.convs:
                x = conv(x, edge_index).relu()
            return self.head(
                functional.dropout(global_add_pool(x, batch, size=batch_size), 0.5, self.training)
            )

    model = GIN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    graphs = [
        Data(
            x=torch.randn(6, 8),
            edge_index=torch.randint(0, 6, (2, 14)),
            y=torch.randint(0, 2, (1,)),
        )
        for _ in range(8)
    ]

    @wrap
    def train(data: Any) -> Any:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.batch, data.num_graphs)
        loss = functional.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train(data) for data in DataLoader(graphs, batch_size=4, shuffle=True)],
        model,
        optimizer,
    )


@script("pygcn: an adjacency matrix that is dense, dropout, nll on indices")
def pygcn(wrap: Wrap) -> Any:
    weights = nn.ModuleList([nn.Linear(8, 16, bias=False), nn.Linear(16, 3, bias=False)])
    optimizer = torch.optim.Adam(weights.parameters(), lr=0.01, weight_decay=5e-4)
    features, adjacency, labels = (
        torch.randn(20, 8),
        torch.softmax(torch.randn(20, 20), 1),
        torch.randint(0, 3, (20,)),
    )
    idx_train, idx_val = torch.arange(8), torch.arange(8, 14)

    @wrap
    def train() -> Any:
        optimizer.zero_grad()
        h = functional.dropout(functional.relu(adjacency @ weights[0](features)), 0.5)
        output = functional.log_softmax(adjacency @ weights[1](h), dim=1)
        loss_train = functional.nll_loss(output[idx_train], labels[idx_train])
        loss_train.backward()
        optimizer.step()
        return loss_train.item(), functional.nll_loss(output[idx_val], labels[idx_val]).item()

    return [train() for _ in range(4)], weights, optimizer


@script(
    "Message passing for molecules written out: scatter_add, edge networks, set2set-like readout"
)
def message_passing(wrap: Wrap) -> Any:
    edge_net, cell, readout = nn.Linear(4, 64), nn.GRUCell(8, 8), nn.Linear(8, 1)
    model = nn.ModuleList([edge_net, cell, readout])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @wrap
    def train(x: Any, edges: Any, edge_attr: Any, graph: Any, y: Any) -> Any:
        source, target = edges
        h = x
        weight = edge_net(edge_attr).view(-1, 8, 8)
        for _ in range(3):
            message = torch.bmm(weight, h[source].unsqueeze(2)).squeeze(2)
            summed = torch.zeros_like(h).index_add(0, target, message)
            h = cell(summed, h)
        pooled = torch.zeros(len(y), 8).scatter_add(0, graph[:, None].expand(-1, 8), h)
        loss = functional.l1_loss(readout(pooled).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    history = []
    for _ in range(4):
        graph = torch.arange(12) // 4
        history.append(
            train(
                torch.randn(12, 8),
                torch.randint(0, 12, (2, 30)),
                torch.randn(30, 4),
                graph,
                torch.randn(3),
            )
        )
    return history, model, optimizer
