// Sparse and nested tensors: only what moves them and takes them apart. torch's kernels for these on the CPU handle
// nothing but the tensors inside, which know their own device, so the device's are the very same.
#include <torch/library.h>

#include "device_allocator.h"

namespace sim {

namespace {

template <c10::DispatchKey key>
void same_kernel_as(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(key, *stack);
}

template <c10::DispatchKey key>
void borrow(torch::Library& library, std::initializer_list<const char*> names) {
  for (const char* name : names) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&same_kernel_as<key>>());
}

void record_stream_of_buffer(at::Tensor& self, at::Stream stream) {
  DeviceAllocator::get().recordStream(self.storage().data_ptr(), stream);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  borrow<c10::DispatchKey::SparseCPU>(
      library, {"_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "empty.memory_format"});
  borrow<c10::DispatchKey::SparseCPU>(library, {"_indices", "_values", "indices", "values", "sparse_dim", "_dimI",
                                                "dense_dim", "_dimV", "_nnz", "is_coalesced", "_coalesced_"});
  borrow<c10::DispatchKey::SparseCPU>(library, {"copy_", "copy_sparse_to_sparse_", "clone", "empty_like",
                                                "sparse_resize_", "sparse_resize_and_clear_", "resize_as_sparse_"});
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, library) {
  borrow<c10::DispatchKey::SparseCsrCPU>(
      library, {"crow_indices", "col_indices", "ccol_indices", "row_indices", "values", "sparse_dim", "dense_dim",
                "_nnz", "copy_", "clone", "empty.memory_format", "empty_like", "resize_as_sparse_"});
}

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, library) {
  borrow<c10::DispatchKey::NestedTensorCPU>(
      library, {"_to_copy", "_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets", "values",
                "copy_", "clone", "empty_like", "detach", "select.int", "unbind.int"});
  library.impl("record_stream", record_stream_of_buffer);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { borrow<c10::DispatchKey::CPU>(library, {"_nested_view_from_buffer"}); }

} // namespace sim
