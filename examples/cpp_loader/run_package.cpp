// Runs a package of dsa_compile.package on saved tensors.
//
//   run_package model.pt2 inputs.pt outputs.pt
//
// inputs.pt holds the tensors of a call in order, as torch.save writes a list of them. outputs.pt
// gets a tuple of the results. Exit status 1 with a message on stderr where anything fails.

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

namespace {

std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error(path + " cannot be read");
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<at::Tensor> read_tensors(const std::string& path) {
  const c10::IValue list = torch::jit::pickle_load(read_file(path));
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : list.toListRef()) {
    tensors.push_back(value.toTensor());
  }
  return tensors;
}

void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors) {
  // A plain tuple, which torch.load takes without further leave.
  const std::vector<c10::IValue> values(tensors.begin(), tensors.end());
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) {
    throw std::runtime_error(path + " cannot be written");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run_package model.pt2 inputs.pt outputs.pt\n";
    return 1;
  }
  try {
    c10::InferenceMode guard;
    torch::inductor::AOTIModelPackageLoader loader(argv[1]);
    const std::unordered_map<std::string, std::string> metadata = loader.get_metadata();
    const auto made_by = metadata.find("dsa_compile");
    const auto target = metadata.find("dsa_compile_target");
    if (made_by == metadata.end() || target == metadata.end()) {
      throw std::runtime_error(std::string(argv[1]) + " is no package of dsa_compile");
    }
    std::cout << "package of dsa_compile " << made_by->second << " for " << target->second << "\n";
    const std::vector<at::Tensor> outputs = loader.run(read_tensors(argv[2]));
    write_tensors(argv[3], outputs);
    for (const at::Tensor& output : outputs) {
      std::cout << output.dtype() << " " << output.sizes() << "\n";
    }
  } catch (const std::exception& fault) {
    std::cerr << "run_package: " << fault.what() << "\n";
    return 1;
  }
  return 0;
}
