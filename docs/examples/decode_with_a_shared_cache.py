"""A prompt and greedy steps under ONNX Runtime, past and present bound to one buffer: script.py LLAMA_WITH_PAST.onnx"""

import sys

import numpy as np
import onnxruntime

import onnx_attnfuse

result = onnx_attnfuse.optimize(sys.argv[1], cache="shared")
result.save("shared.onnx")
decoder = result.report.decoder
assert decoder is not None, result.report.notes
print(f"fused {result.report.fused} of {result.report.candidates} attentions")

session = onnxruntime.InferenceSession("shared.onnx", providers=onnx_attnfuse.providers(result))
device = "cuda" if "CUDAExecutionProvider" in session.get_providers() else "cpu"
prompt = np.array([[0, 0, 5, 7, 11, 2], [3, 8, 4, 6, 9, 12]])  # the first is padded, on either side as you like
mask = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
room = prompt.shape[1] + 20  # the most tokens there will ever be
shape = (len(prompt), decoder.kv_heads, room, decoder.head_size)
pasts, presents = decoder.past_keys + decoder.past_values, decoder.present_keys + decoder.present_values
types = {given.name: np.float16 if "float16" in given.type else np.float32 for given in session.get_inputs()}
buffers = [onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, types[past]), device) for past in pasts]

tokens, generated = prompt, []
for _ in range(8):
    positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -tokens.shape[1] :]
    binding = session.io_binding()
    for name, array in ((decoder.input_ids, tokens), (decoder.attention_mask, mask), (decoder.position_ids, positions)):
        if name is not None:
            binding.bind_cpu_input(name, array)
    for past, present, buffer in zip(pasts, presents, buffers, strict=True):  # what is read is what is written
        binding.bind_ortvalue_input(past, buffer)
        binding.bind_ortvalue_output(present, buffer)
    binding.bind_output(decoder.logits, "cpu")
    session.run_with_iobinding(binding)
    logits = binding.get_outputs()[-1].numpy()
    last = logits.shape[1] - 1 - mask[:, -tokens.shape[1] :][:, ::-1].argmax(1)  # the last token that is no padding
    tokens = logits[np.arange(len(last)), last].argmax(-1)[:, None]
    mask = np.concatenate([mask, np.ones_like(tokens)], axis=1)
    generated.append(tokens)
print(np.concatenate(generated, axis=1))
