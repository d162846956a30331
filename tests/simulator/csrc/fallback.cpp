// Every operator without a kernel of its own: learn the outputs' shapes on the meta device, allocate them now, and run
// the CPU kernel later, on the stream's thread. What cannot be done like that (data-dependent shapes, views, sparse
// arguments, ...) runs at once, after waiting for the stream.
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "captures.h"
#include "random.h"
#include "tensors.h"

namespace sim {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {

// A copy of the value in which each tensor, also one inside a list, is what `change` makes of it.
template <class Change>
IValue map_tensors(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(tensor.defined() ? change(tensor) : tensor);
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
      changed.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    return changed;
  }
  return value;
}

template <class Visit>
void for_each_tensor(const IValue& value, Visit visit) {
  map_tensors(value, [&](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

// One call of an operator on the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& stack)
      : op_(op), schema_(op.schema()), arguments_(stack.end() - schema_.arguments().size(), stack.end()) {
    match_returns_with_arguments();
  }

  // The device its arguments name or live on; -1: the current one.
  int device() const {
    int device = -1;
    for (const IValue& value : arguments_) {
      if (value.isDevice() && value.toDevice().type() == kDeviceType) device = value.toDevice().index();
      for_each_tensor(value, [&](const Tensor& tensor) {
        if (on_device(tensor)) device = tensor.device().index();
      });
    }
    return device;
  }

  // False where the outputs cannot be known without the data.
  bool infer_outputs() {
    TORCH_CHECK_NOT_IMPLEMENTED(op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                                "sim: there is no CPU kernel to run for ", schema_.name());
    if (returns_views_ || !only_plain_tensors()) return false;
    try {
      for (const IValue& value : arguments_) on_meta_.push_back(to_meta(value));
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.callBoxed(&on_meta_);
    } catch (const std::exception&) {
      return false; // no meta kernel, or wrong arguments: then the synchronous way raises the proper error
    }
    return on_meta_.size() == schema_.returns().size();
  }

  std::vector<Tensor> launch_on_current_stream() {
    Work work{.stream = current_stream(), .name = schema_.name().c_str(), .duration = kernel_duration()};
    std::vector<Tensor> outputs = make_outputs(work);
    // In place or out=: the kernel itself writes there. The others are copied from what the CPU kernel returns.
    std::vector<Tensor> to_fill;
    for (size_t i = 0; i < outputs.size(); i++) {
      const bool filled_by_kernel = argument_of_return_[i] >= 0 || !outputs[i].defined();
      to_fill.push_back(filled_by_kernel ? Tensor() : bytes_as_host_tensor(outputs[i]));
    }
    Stack on_host;
    for (size_t i = 0; i < arguments_.size(); i++) {
      add_accesses(i, work);
      on_host.push_back(to_host(i));
    }
    work.body = [op = op_, arguments = std::move(on_host), to_fill = std::move(to_fill)] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      Stack stack = arguments; // a graph runs this again
      op.callBoxed(&stack);
      for (size_t i = 0; i < to_fill.size(); i++)
        // A kernel may leave a result empty that the meta kernel gives a size: batch_norm's statistics in eval mode.
        if (to_fill[i].defined() && stack[i].toTensor().sizes() == to_fill[i].sizes())
          to_fill[i].copy_(stack[i].toTensor());
    };
    if (reads_host_memory_) check_host_uses_stream(work.stream, work.name);
    launch(std::move(work));
    if (reads_host_memory_) finish_stream(current_stream()); // the caller may change it next
    return outputs;
  }

 private:
  void match_returns_with_arguments() {
    for (const c10::Argument& result : schema_.returns()) {
      int same = -1;
      only_tensors_returned_ = only_tensors_returned_ && result.type()->kind() == c10::TypeKind::TensorType;
      if (const c10::AliasInfo* alias = result.alias_info()) {
        if (!alias->isWrite()) returns_views_ = true;
        for (size_t i = 0; i < schema_.arguments().size(); i++) {
          const c10::AliasInfo* other = schema_.arguments()[i].alias_info();
          if (other && other->beforeSets() == alias->beforeSets()) same = static_cast<int>(i);
        }
      }
      argument_of_return_.push_back(same);
    }
  }

  bool only_plain_tensors() const {
    bool plain = only_tensors_returned_;
    for (const IValue& value : arguments_)
      for_each_tensor(value, [&](const Tensor& tensor) {
        plain = plain && tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
                (on_device(tensor) || tensor.is_cpu());
      });
    return plain;
  }

  static IValue to_meta(const IValue& value) {
    if (value.isDevice()) return at::Device(at::kMeta);
    return map_tensors(value, [](const Tensor& tensor) {
      if (tensor.is_cpu() && tensor.dim() == 0) return tensor; // a number: its value may matter for the result's dtype
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    });
  }

  IValue to_host(size_t index) {
    const IValue& value = arguments_[index];
    if (value.isDevice()) return at::Device(at::kCPU);
    if (is_generator(schema_.arguments()[index]) && value.isNone()) return device_generator(current_device());
    return map_tensors(value, [this](const Tensor& tensor) {
      if (on_device(tensor)) return bytes_as_host_tensor(tensor);
      if (tensor.dim() == 0) return tensor.clone(); // passed by value
      reads_host_memory_ = true;
      return tensor;
    });
  }

  static bool is_generator(const c10::Argument& argument) {
    const c10::TypePtr& type = argument.type();
    if (type->kind() == c10::TypeKind::GeneratorType) return true;
    const auto optional = type->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  std::vector<Tensor> make_outputs(Work& work) {
    std::vector<Tensor> outputs;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      const Tensor& shape = on_meta_[i].toTensor();
      if (argument_of_return_[i] >= 0) {
        Tensor output = arguments_[argument_of_return_[i]].toTensor();
        if (output.sizes() != shape.sizes()) output.resize_(shape.sizes()); // out=
        outputs.push_back(output);
      } else if (!shape.defined()) {
        outputs.emplace_back();
      } else {
        outputs.push_back(empty_on_device(shape.sizes(), shape.strides(), shape.scalar_type()));
        if (DeviceBlock* block = block_of(outputs.back())) work.writes.push_back(block);
      }
    }
    return outputs;
  }

  void add_accesses(size_t index, Work& work) {
    const c10::AliasInfo* alias = schema_.arguments()[index].alias_info();
    auto& accesses = alias && alias->isWrite() ? work.writes : work.reads;
    for_each_tensor(arguments_[index], [&](const Tensor& tensor) {
      if (!on_device(tensor)) return;
      if (DeviceBlock* block = block_of(tensor)) accesses.push_back(block);
    });
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack arguments_, on_meta_;
  std::vector<int> argument_of_return_; // which argument a return aliases for writing; -1: none
  bool returns_views_ = false, only_tensors_returned_ = true, reads_host_memory_ = false;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  DeviceScope scope(call.device());
  if (!call.infer_outputs()) {
    check_host_uses_stream(current_stream(), op.schema().name().c_str());
    finish_stream(current_stream());
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
    return;
  }
  std::vector<Tensor> outputs = call.launch_on_current_stream();
  stack->erase(stack->end() - op.schema().arguments().size(), stack->end());
  for (Tensor& output : outputs) stack->emplace_back(std::move(output));
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // Left alone these would decompose towards kernels that a new backend has to bring itself.
  for (const char* name : {"convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace sim
