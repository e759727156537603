"""horovod.run from a notebook or a service: a function, its arguments, what the ranks return.
Ends with the results by rank, and with the error of a rank."""

import horovod


def train(scale, offset=0):
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + offset)]), op=hvd.Sum)
    weights = hvd.allgather(model.weight.detach())
    assert all(torch.equal(row, weights[0]) for row in weights)
    return hvd.rank(), hvd.size(), scale * total.item()


def main():
    results = horovod.run(train, args=(2.0,), kwargs={"offset": 1}, np=2, use_gloo=True)
    assert results == [(0, 2, 6.0), (1, 2, 6.0)], results
    print("results", results)


if __name__ == "__main__":
    main()
