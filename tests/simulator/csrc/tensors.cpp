// Making tensors on the device, and looking at their memory in other ways.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

using at::IntArrayRef;
using at::Tensor;

DeviceBlock* block_of(const Tensor& tensor) {
  return tensor.numel() ? DeviceAllocator::get().find(tensor.storage().data()) : nullptr;
}

Tensor bytes_as_host_tensor(const Tensor& tensor) {
  void* const data = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Tensor empty_on_device(IntArrayRef sizes, IntArrayRef strides, at::ScalarType dtype, int device) {
  DeviceScope scope(device);
  return at::detail::empty_strided_generic(sizes, strides, &DeviceAllocator::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

namespace {

int index_or_current(const std::optional<at::Device>& device) { return device ? device->index() : -1; }

Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin_memory,
             std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "sim: only CPU tensors can be pinned");
  DeviceScope scope(index_or_current(device));
  return at::detail::empty_generic(sizes, &DeviceAllocator::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "sim: only CPU tensors can be pinned");
  return empty_on_device(sizes, strides, c10::dtype_or_default(dtype), index_or_current(device));
}

// Give the storage at least this many bytes, keeping what it holds; in stream order, as on a device.
void grow(const c10::Storage& storage_to_grow, size_t needed) {
  c10::Storage storage = storage_to_grow;
  const size_t held = storage.nbytes();
  if (needed <= held) return;
  at::DataPtr fresh = DeviceAllocator::get().allocate(needed);
  if (held) {
    DeviceAllocator& allocator = DeviceAllocator::get();
    char* to = static_cast<char*>(fresh.get());
    const char* from = static_cast<const char*>(storage.data());
    launch({.stream = current_stream(),
            .name = "resize",
            .reads = {allocator.find(from)},
            .writes = {allocator.find(to)},
            .body = [to, from, held] { std::memcpy(to, from, held); }});
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(needed);
}

const Tensor& resize_(const Tensor& self, IntArrayRef sizes, std::optional<at::MemoryFormat> memory_format) {
  DeviceScope scope(device_index(self));
  grow(self.storage(),
       at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(), self.storage_offset()));
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (memory_format) impl->empty_tensor_restride(*memory_format);
  return self;
}

Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.data() && strides.size() == sizes.size())
    impl->set_sizes_and_strides(sizes, strides);
  else
    impl->set_sizes_contiguous(sizes);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const int64_t elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, elements, {});
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}

// Without a registration of its own it would end in the fallback, which raises.
void record_stream(Tensor& self, at::Stream stream) {
  DeviceAllocator::get().recordStream(self.storage().data_ptr(), stream);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("as_strided", as_strided);
  library.impl("view", [](const Tensor& self, IntArrayRef sizes) { return at::native::view(self, sizes); });
  library.impl("_reshape_alias", [](const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
    return at::native::_reshape_alias(self, sizes, strides);
  });
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor",
               [](Tensor& self, const Tensor& source) -> Tensor& { return at::native::set_tensor_(self, source); });
  library.impl("is_set_to", is_set_to);
  library.impl("record_stream", record_stream);
}

} // namespace sim
