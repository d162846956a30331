// Graphs, as torch.accelerator.Graph has them.
#pragma once

namespace sim {

// Resets all there are, those whose capture is under way included.
void reset_graphs();

} // namespace sim
