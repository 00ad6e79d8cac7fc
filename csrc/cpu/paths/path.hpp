// The three paths: the same inner loops, compiled for three instruction sets. The path is chosen at run time.
//
// path_kernels.cpp is compiled once per path, with the flags of that path, and fills one `PathKernels`. The algorithms (select.cpp,
// reduce.cpp, ...) are compiled once, for any CPU, and call the inner loops through `active_path()`.
#pragma once

#include <string>
#include <vector>

#include "cpu/paths/path_kernels.hpp"

namespace topkube {

// Returns the path in use: the best path that this CPU can run, unless `use_path` chose another.
const PathKernels& active_path();

// Returns the names of the paths that this CPU can run, best first.
std::vector<std::string> available_paths();

// Uses the path called `name` from now on, in all threads. Returns false if this CPU cannot run it.
bool use_path(const std::string& name);

}  // namespace topkube
