"""The peak memory of a training step, without and with the patch. It works on the CPU and on CUDA.

`tigon profile RECIPE.yaml` draws the memory over a step, and names the calls at the peak.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tigon
from tigon.profiler.recording.peak import PeakMeter, training_state

# The head is the largest part here, as in small models with a large vocabulary.
CONFIG = LlamaConfig(
    vocab_size=8192, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
)  # fmt: skip
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step_mib(patched: bool) -> float:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).train().to(device)
    if patched:
        tigon.patch(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(CONFIG.vocab_size, (4, 256), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer allocates its state in the first step
    meter = PeakMeter(device)
    meter.start(training_state(model, optimizer))
    step()
    return meter.stop().step_bytes / 2**20


plain, patched = step_mib(patched=False), step_mib(patched=True)
print(f"a step of 4 x 256 tokens takes {plain:.0f} MiB unpatched and {patched:.0f} MiB patched, beside the weights")
assert patched < 0.7 * plain
