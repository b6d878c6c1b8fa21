// Loss scaling for llm.c: what its GPT-2 trainer lacks to train in FP16. docs/llm.c.md lists the
// edits; `apply` makes them. For train_gpt2.cu, after gpt2_free().
#pragma once
#include <headroom/cuda.h>
#include <headroom/headroom.h>

// Scaler and AdamW for the tensors of a model. Masters and moments are the arrays that llm.c has
// allocated. step() does not wait for the device.
struct ScaledAdamW {
  headroom::AdamW adamw;
  headroom::GradScaler scaler;

  // Call it after gpt2_allocate_state().
  ScaledAdamW(GPT2* model, float weight_decay)
      : adamw({}),
        scaler(headroom::preset("headroom"),
               {true, {headroom::DeviceType::kCUDA, multi_gpu_config.local_device_idx}}) {
    static const char* const kNames[] = {"wte",      "wpe",      "ln1w", "ln1b", "qkvw", "qkvb",
                                         "attprojw", "attprojb", "ln2w", "ln2b", "fcw",  "fcb",
                                         "fcprojw",  "fcprojb",  "lnfw", "lnfb"};
    cudaCheck(cudaMemset(model->m_memory, 0, model->num_parameters * sizeof(float)));
    cudaCheck(cudaMemset(model->v_memory, 0, model->num_parameters * sizeof(float)));
    for (int i = 0; i < NUM_PARAMETER_TENSORS; ++i) {
      const int layers = i >= 2 && i <= 13 ? model->config.num_layers : 1;
      std::vector<headroom::Parameter> tensors(layers);
      for (int layer = 0; layer < layers; ++layer) {
        const ShardInfo place = gpt2_get_tensor_at_layer(model, layer, i);
        const auto view = [&](auto* all) {
          return headroom::device_view(all + place.offset, static_cast<int64_t>(place.size));
        };
        tensors[layer] = {kNames[i] + std::to_string(layer),
                          view(static_cast<floatX*>(model->params_memory)),
                          view(static_cast<floatX*>(model->grads_memory)),
                          view(model->master_weights),
                          view(model->m_memory),
                          view(model->v_memory)};
      }
      // llm.c's betas and epsilon. Like there, only matrices decay.
      const bool is_matrix = i == 0 || i == 1 || i == 4 || i == 6 || i == 10 || i == 12;
      adamw.add_group(tensors, {0.0, 0.9, 0.95, 1e-8, is_matrix ? weight_decay : 0.0f});
    }
    adamw.refresh_masters();
  }

  // Measures, clips to a norm of 1, updates or skips, and adapts the scale.
  void step(float learning_rate, cudaStream_t stream) {
    const headroom::StreamScope scope(stream);
    adamw.set_lr(learning_rate);
    headroom::StepOptions options;
    options.max_norm = 1.0f;
    scaler.step(adamw, options);
    scaler.update();
  }
};
