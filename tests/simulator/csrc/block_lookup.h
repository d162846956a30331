// Finding the block of memory that an address points into.
#pragma once

#include <iterator>

namespace sim {

// `blocks` maps the beginnings of blocks to them, in order. Null where the address is in none; interior addresses count.
template <class Blocks>
typename Blocks::mapped_type* block_containing(Blocks& blocks, const void* address) {
  char* const target = const_cast<char*>(static_cast<const char*>(address));
  auto after = blocks.upper_bound(target);
  if (after == blocks.begin()) return nullptr;
  auto& block = std::prev(after)->second;
  return target < block.begin + block.bytes ? &block : nullptr;
}

} // namespace sim
