"""Hugging Face Accelerate on this package: initialise torch.distributed first, and Accelerate takes what is there.
Run: farandole run -np 2 python examples/accelerate_digits.py"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("farandole")
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(1)

digits = load_digits()
images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader, tests = DataLoader(train, 50, shuffle=True), DataLoader(test, 50)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8 * len(loader))
model, optimizer, loader, tests, scheduler = accelerator.prepare(model, optimizer, loader, tests, scheduler)

for _ in range(8):
    for image, label in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(image), label))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

folder = [tempfile.mkdtemp()] if accelerator.is_main_process else [None]
dist.broadcast_object_list(folder, 0)
accelerator.save_state(folder[0])
accelerator.wait_for_everyone()  # the main process writes
accelerator.load_state(folder[0])

model.eval()
right = count = 0
with torch.no_grad():
    for image, label in tests:
        predicted, wanted = accelerator.gather_for_metrics((model(image).argmax(1), label))
        right, count = right + int((predicted == wanted).sum()), count + len(wanted)
accelerator.print(
    f"{accelerator.num_processes} processes on {dist.get_backend()}: {100 * right / count:.1f}% of {count}"
)
dist.destroy_process_group()
